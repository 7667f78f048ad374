"""The ledger: its chain, and its lineage rule against a replayed history."""

import copy
import random
from typing import Any

import pytest

from surefoot.config.data import Exclusion
from surefoot.guard.ledger import Ledger, check
from surefoot.guard.ledger_row import KINDS, LedgerError


def attempt(ledger: Ledger, from_batch: int, reason: str = "", checkpoint: str = "", exclude: Any = ()) -> Ledger:
    number = ledger.attempt + 1
    fields = {
        "attempt": number,
        "reason": reason or ("start" if number == 1 else "resume"),
        "from_step": from_batch,
        "from_batch": from_batch,
        "checkpoint": checkpoint,
        "exclude": exclude,
        "cause": "",
    }
    return ledger.append(ledger.next_row("attempt", fields, 1.0))


def checkpoint(ledger: Ledger, batch: int, name: str = "") -> Ledger:
    name = name or f"step-{batch:06d}-attempt-{ledger.attempt:04d}"
    fields = {"name": name, "step": batch, "batch_index": batch, "attempt": ledger.attempt, "digest": "d"}
    return ledger.append(ledger.next_row("checkpoint", fields, 2.0))


def skip(ledger: Ledger, batch: int) -> Ledger:
    return ledger.append(ledger.next_row("skip", {"batch_index": batch, "step": batch, "cause": "loss is NaN"}, 3.0))


def test_rows_are_numbered_and_chained_and_the_time_is_not_part_of_the_hash() -> None:
    ledger = checkpoint(attempt(Ledger(), 0), 10)
    assert [row["n"] for row in ledger.rows] == [0, 1]
    assert ledger.prefix_hash(0) == ""
    assert ledger.prefix_hash(2) == ledger.rows[1]["hash"] != ledger.prefix_hash(1)
    later = Ledger([{**row, "time": 99.0} for row in ledger.rows])
    assert later.prefix_hash(2) == ledger.prefix_hash(2)
    with pytest.raises(ValueError, match="the ledger has 2 rows; there is no prefix of 3"):
        ledger.prefix_hash(3)


def test_the_hash_is_the_written_formula() -> None:
    import hashlib
    import json

    ledger = checkpoint(attempt(Ledger(), 0), 10)
    previous = ""
    for row in ledger.rows:
        body = {key: value for key, value in row.items() if key not in ("hash", "time")}
        text = json.dumps(body, sort_keys=True, separators=(",", ":"))
        previous = hashlib.sha256((previous + text).encode()).hexdigest()[:16]
        assert row["hash"] == previous


def test_a_changed_missing_or_swapped_row_is_refused_by_its_number() -> None:
    ledger = skip(checkpoint(attempt(Ledger(), 0), 10), 12)
    rows = [dict(row) for row in ledger.rows]
    check(rows)
    changed = copy.deepcopy(rows)
    changed[1]["digest"] = "other"
    with pytest.raises(LedgerError, match=r"ledger row 1: its hash is '\w{16}' where the chain gives '\w{16}'") as info:
        check(changed)
    assert info.value.n == 1
    with pytest.raises(LedgerError, match=r"ledger row 1: it says n=2; rows count 0, 1, 2 \.\. without a gap"):
        check([rows[0], rows[2]])
    with pytest.raises(LedgerError, match="ledger row 0: it says n=1"):
        check([rows[1], rows[0]])
    renumbered = [rows[0], {**rows[2], "n": 1}]
    with pytest.raises(LedgerError, match="ledger row 1: its hash is"):
        check(renumbered)


def test_appending_leaves_the_shorter_ledger_as_it_was() -> None:
    first = attempt(Ledger(), 0)
    second = attempt(first, 5)
    assert (len(first.rows), first.attempt) == (1, 1)
    assert (len(second.rows), second.attempt) == (2, 2)
    assert second.prefix(1).rows == first.rows
    assert second.prefix(1).attempts == first.attempts


def test_numbers_that_are_not_finite_are_written_as_text() -> None:
    ledger = attempt(Ledger(), 0)
    row = ledger.next_row("verdict", {"evidence": {"loss": float("nan"), "norms": (1.0, float("inf"))}}, 0.0)
    assert row["evidence"] == {"loss": "NaN", "norms": [1.0, "Infinity"]}
    assert ledger.append(row).of_kind("verdict") == [row]


def test_rows_that_contradict_the_history_are_refused_with_the_way_out() -> None:
    ledger = attempt(checkpoint(checkpoint(attempt(Ledger(), 0), 50, "a"), 80, "b"), 50, "rollback", "a")
    with pytest.raises(LedgerError, match=r"kind 'party' is not known; the kinds are attempt, checkpoint"):
        ledger.next_row("party", {}, 0.0)
    with pytest.raises(LedgerError, match="a 'skip' row needs step, cause as well"):
        ledger.next_row("skip", {"batch_index": 3}, 0.0)
    with pytest.raises(LedgerError, match="write the attempt row first"):
        skip(Ledger(), 3)
    with pytest.raises(LedgerError, match="may not set n, kind or time itself"):
        ledger.next_row("certified", {"name": "a", "time": 3}, 0.0)
    with pytest.raises(
        LedgerError, match=r"attempt 3 would start from b, which an earlier rollback left behind.*\['a'\]"
    ):
        attempt(ledger, 80, checkpoint="b")
    with pytest.raises(LedgerError, match="from_batch is 40, but a is at batch 50"):
        attempt(ledger, 40, checkpoint="a")
    with pytest.raises(LedgerError, match="attempt 1 follows attempt 2; it must be the next number"):
        ledger.next_row("attempt", {k: ledger.rows[0][k] for k in KINDS["attempt"]}, 0.0)
    with pytest.raises(LedgerError, match="reason 'whim' of an attempt is not one of start, resume, rollback, fork"):
        attempt(ledger, 50, "whim")


def test_a_document_cannot_be_excluded_from_batches_that_were_read_with_it() -> None:
    ledger = attempt(Ledger(), 0)
    with pytest.raises(LedgerError, match="excluded from batch 30, but batches below 50 stay as they were read"):
        attempt(ledger, 50, "rollback", exclude=[Exclusion(document="f" * 16, from_batch=30)])
    once = attempt(ledger, 30, "rollback", exclude=[Exclusion(document="f" * 16, from_batch=30)])
    again = attempt(once, 50, "resume", exclude=once.exclusions)
    assert again.exclusions == (Exclusion(document="f" * 16, from_batch=30),)


def test_exclusions_stay_in_force_through_deeper_rollbacks_from_the_earliest_batch_named() -> None:
    one, two = "1" * 16, "2" * 16
    ledger = attempt(Ledger(), 0)
    ledger = attempt(ledger, 60, "rollback", exclude=[Exclusion(document=two, from_batch=60)])
    ledger = attempt(ledger, 40, "rollback", exclude=[Exclusion(document=one, from_batch=40)])
    assert ledger.exclusions == (Exclusion(document=one, from_batch=40), Exclusion(document=two, from_batch=60))
    ledger = attempt(ledger, 20, "rollback", exclude=[Exclusion(document=two, from_batch=20)])
    expected = (Exclusion(document=one, from_batch=40), Exclusion(document=two, from_batch=20))
    assert ledger.exclusions == Ledger(ledger.rows).exclusions == expected


def test_the_newest_certified_checkpoint_is_the_latest_surviving_state_with_a_certificate() -> None:
    ledger = attempt(Ledger(), 0)
    assert ledger.newest_certified() is None
    for batch, name in ((20, "a"), (40, "b"), (60, "c")):
        ledger = checkpoint(ledger, batch, name)
    for name in ("b", "c"):
        ledger = ledger.append(ledger.next_row("certified", {"name": name}, 0.0))
    assert ledger.newest_certified() == next(c for c in ledger.checkpoints if c.name == "c")
    ledger = attempt(ledger, 40, "rollback", "b")
    newest = ledger.newest_certified()
    assert newest is not None
    assert newest.name == "b"
    assert [c.name for c in ledger.surviving_checkpoints()] == ["a", "b"]


def test_a_finished_or_stopped_run_that_is_taken_up_again_is_neither() -> None:
    ledger = attempt(Ledger(), 0)
    stopped = ledger.append(ledger.next_row("stop", {"reason": "SIGTERM"}, 0.0))
    assert stopped.stop is not None
    assert stopped.finish is None
    again = attempt(stopped, 10)
    assert again.stop is None
    done = again.append(again.next_row("finish", {"step": 20, "batch_index": 21, "digest": "d"}, 0.0))
    assert done.finish is not None
    assert attempt(done, 20).finish is None


class Replay:
    """A run acted out: the line of (attempt, batch) that made the weights, copied and restored like a state."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.ledger = attempt(Ledger(), 0)
        self.line: list[tuple[int, int]] = []
        self.batch = 0
        self.saved: dict[str, tuple[tuple[int, int], ...]] = {}
        self.snapshots: list[tuple[tuple[int, int], ...]] = []
        self.everything: set[tuple[int, int]] = set()
        self.skipped: set[tuple[int, int]] = set()

    def alive(self) -> list[str]:
        line = tuple(self.line)
        return [name for name, saved in self.saved.items() if line[: len(saved)] == saved]

    def step(self) -> None:
        for _ in range(self.rng.randint(1, 7)):
            mark = (self.ledger.attempt, self.batch)
            self.line.append(mark)
            self.everything.add(mark)
            if self.rng.random() < 0.1:
                self.ledger = skip(self.ledger, self.batch)
                self.skipped.add(mark)
            self.batch += 1

    def save(self) -> None:
        name = f"step-{self.batch:06d}-attempt-{self.ledger.attempt:04d}"
        self.ledger = checkpoint(self.ledger, self.batch, name)
        self.saved[name] = tuple(self.line)

    def snapshot(self) -> None:
        self.snapshots.append(tuple(self.line))

    def restore(self, reason: str, name: str, line: tuple[tuple[int, int], ...]) -> None:
        self.ledger = attempt(self.ledger, len(line), reason, name)
        self.line, self.batch = list(line), len(line)

    def roll_back(self) -> None:
        line = tuple(self.line)
        memory = [s for s in self.snapshots if line[: len(s)] == s]
        targets = [("snapshot", s) for s in memory] + [(name, self.saved[name]) for name in self.alive()]
        if targets:
            self.restore("rollback", *self.rng.choice(targets))

    def kill(self) -> None:
        self.snapshots.clear()
        names = self.alive()
        name = self.rng.choice([names[-1], self.rng.choice(names)]) if names else ""
        self.restore("resume", name, self.saved[name] if name else ())


@pytest.mark.parametrize("seed", range(120))
def test_the_lineage_rule_agrees_with_a_replay_of_kills_rollbacks_and_resumes(seed: int) -> None:
    rng = random.Random(seed)
    run = Replay(rng)
    for _ in range(rng.randint(5, 60)):
        rng.choices([run.step, run.save, run.snapshot, run.roll_back, run.kill], [5, 3, 2, 1.5, 1])[0]()
        survivors = {mark for mark in run.everything if run.ledger.row_survives(*mark)}
        assert survivors == set(run.line)
        assert [batch for _, batch in run.line] == list(range(run.batch))
        assert {c.name for c in run.ledger.surviving_checkpoints()} == set(run.alive())
        assert {(s.attempt, s.batch_index) for s in run.ledger.skips()} == run.skipped & set(run.line)
    again = Ledger(run.ledger.rows)
    assert again.surviving_checkpoints() == run.ledger.surviving_checkpoints()
    assert again.skips() == run.ledger.skips()


def test_a_long_ledger_is_read_in_one_pass() -> None:
    ledger = attempt(Ledger(), 0)
    for batch in range(2000):
        ledger = skip(ledger, batch)
    assert len(Ledger(ledger.rows).skips()) == 2000
