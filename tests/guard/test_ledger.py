"""The ledger: its chain, and its lineage rule against a replayed history."""

import copy
import random
from typing import Any

import pytest

from surefoot.config.data import Exclusion
from surefoot.guard.ledger import Ledger, check
from surefoot.guard.ledger_row import KINDS, LedgerError
from surefoot.guard.lr_change import LrChange
from surefoot.guard.record import PastRollback, Record


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


def write(ledger: Ledger, kind: str, **fields: Any) -> Ledger:
    return ledger.append(ledger.next_row(kind, fields, 4.0))


def lr_event(ledger: Ledger, batch: int, step: int, factor: float = 0.3) -> Ledger:
    rate = {"start_step": step, "factor": factor, "hold_steps": 20, "ramp_steps": 50, "settle": 0.5}
    return write(ledger, "lr_event", **rate, cause="growing", batch_index=batch)


def roll_back(ledger: Ledger, at: int, to: int, restored: int) -> Ledger:
    ledger = write(ledger, "verdict", action="rollback", text="back", batch_index=at, to_batch=to)
    return attempt(ledger, restored, "rollback")


def test_the_record_says_what_the_guard_has_spent_and_never_rewinds() -> None:
    ledger = attempt(Ledger(), 0)
    assert (ledger.record, ledger.lr_events) == (Record(), ())
    ledger = skip(skip(ledger, 3), 4)
    ledger = write(ledger, "skip", batch_index=5, step=3, cause="data", passes=[])
    ledger = lr_event(ledger, 8, 6)
    ledger = write(ledger, "verdict", action="proceed", text="seen", batch_index=9)
    ledger = roll_back(ledger, 30, 20, 10)
    ledger = write(ledger, "verdict", action="rollback", text="t", batch_index=25, to_batch=15, passes=[{"kind": "x"}])
    assert ledger.record.rollbacks[-1] == PastRollback(at_batch=25, to_batch=15)
    assert ledger.record.rollbacks[-1].from_batch == 15
    ledger = lr_event(ledger, 25, 15, factor=0.1)
    ledger = attempt(ledger, 9, "rollback")
    expected = Record(
        rollbacks=(
            PastRollback(at_batch=30, to_batch=20, restored=10),
            PastRollback(at_batch=25, to_batch=15, restored=9),
        ),
        lr_events_at=(8, 25),
        investigations_at=(5, 25),
        num_skips=3,
    )
    assert ledger.record == Ledger(ledger.rows).record == expected
    assert ledger.record.rollbacks[0].from_batch == 10
    assert attempt(ledger, 9).record == expected
    change = LrChange(start_step=6, factor=0.3, hold_steps=20, ramp_steps=50, settle=0.5)
    assert ledger.lr_events == (change, LrChange(start_step=15, factor=0.1, hold_steps=20, ramp_steps=50, settle=0.5))
    assert ledger.prefix(5).lr_events == (change,)
    assert ledger.prefix(4).record == Record(num_skips=3, investigations_at=(5,))


def test_a_resume_after_a_rollback_does_not_change_what_was_restored() -> None:
    ledger = roll_back(attempt(Ledger(), 0), 30, 20, 10)
    ledger = attempt(ledger, 5, "rollback")
    assert ledger.record.rollbacks == (PastRollback(at_batch=30, to_batch=20, restored=10),)


def test_what_a_resumed_process_goes_through_again_is_decided_again_and_counts_once() -> None:
    """Killed at batch 9 and resumed from batch 4: the decisions at 4 and 8 fall again, and are written again."""
    ledger = skip(attempt(Ledger(), 0), 3)
    ledger = lr_event(skip(ledger, 4), 8, 6)
    ledger = attempt(ledger, 4)
    assert (ledger.record, ledger.lr_events) == (Record(num_skips=1), ())
    ledger = lr_event(skip(ledger, 4), 8, 6)
    assert ledger.record == Record(num_skips=2, lr_events_at=(8,))
    assert len(ledger.lr_events) == 1


def test_what_a_rollback_left_behind_stays_spent_through_every_resume() -> None:
    ledger = lr_event(skip(attempt(Ledger(), 0), 12), 15, 14)
    ledger = lr_event(write(ledger, "verdict", action="rollback", text="t", batch_index=18, to_batch=10), 18, 10)
    ledger = attempt(ledger, 10, "rollback")
    spent = Record(rollbacks=(PastRollback(at_batch=18, to_batch=10, restored=10),), lr_events_at=(15, 18), num_skips=1)
    assert ledger.record == spent
    again = attempt(ledger, 5)
    assert (again.record, again.lr_events) == (spent, ledger.lr_events)
    assert [change.start_step for change in again.lr_events] == [14, 10]


def test_a_rollback_that_a_kill_cut_short_was_none() -> None:
    """Its verdict was written, and its rate; the attempt that would have carried it out was not."""
    ledger = lr_event(
        write(attempt(Ledger(), 0), "verdict", action="rollback", text="t", batch_index=18, to_batch=10), 18, 10
    )
    ledger = attempt(ledger, 5)
    assert (ledger.record, ledger.lr_events) == (Record(), ())
    ledger = attempt(write(ledger, "verdict", action="rollback", text="t", batch_index=18, to_batch=10), 8, "rollback")
    assert ledger.record.rollbacks == (PastRollback(at_batch=18, to_batch=10, restored=8),)


def test_decisions_about_batches_that_are_read_again_before_a_rollbacks_target_are_made_again() -> None:
    """Whether the state before batch 10 was still in memory or only the one before batch 6 must not matter in the end."""
    ledger = lr_event(attempt(Ledger(), 0), 8, 7)
    near, far = roll_back(ledger, 18, 10, 10), roll_back(ledger, 18, 10, 6)
    assert near.record.lr_events_at == (8,)
    assert far.record.lr_events_at == ()
    assert lr_event(far, 8, 7).lr_events == near.lr_events


def test_what_lies_before_a_rollbacks_target_is_judged_again_as_it_was_the_first_time() -> None:
    """Batches that are only read again know nothing of what happened after them; from the target on it counts."""
    ledger = lr_event(attempt(Ledger(), 0), 25, 24)
    ledger = write(ledger, "verdict", action="rollback", text="t", batch_index=40, to_batch=30)
    ledger = attempt(lr_event(ledger, 40, 30), 5, "rollback")
    assert ledger.record_at(10) == Record()
    assert ledger.record_at(29).rollbacks == ()
    assert ledger.record_at(30).lr_events_at == (40,)
    assert [past.at_batch for past in ledger.record_at(35).rollbacks] == [40]
    again = lr_event(ledger, 25, 24)
    assert again.record_at(35).lr_events_at == (40, 25)
    assert ledger.record == ledger.record_at(40)


@pytest.mark.parametrize("missing", KINDS["lr_event"])
def test_an_lr_event_needs_all_that_a_rate_is_made_of(missing: str) -> None:
    whole = dict(lr_event(attempt(Ledger(), 0), 8, 6).rows[-1])
    fields = {k: v for k, v in whole.items() if k not in ("n", "kind", "time", "hash", missing)}
    with pytest.raises(LedgerError, match=f"a 'lr_event' row needs {missing} as well"):
        attempt(Ledger(), 0).next_row("lr_event", fields, 0.0)


def test_two_ledgers_grown_from_one_do_not_see_each_other() -> None:
    trunk = skip(attempt(Ledger(), 0), 1)
    left = lr_event(skip(trunk, 2), 3, 3)
    right = skip(trunk, 7)
    longer = skip(left, 9)
    assert [row.get("batch_index") for row in trunk.rows] == [None, 1]
    assert [row.get("batch_index") for row in left.rows] == [None, 1, 2, 3]
    assert [row.get("batch_index") for row in right.rows] == [None, 1, 7]
    assert [row.get("batch_index") for row in longer.rows] == [None, 1, 2, 3, 9]
    assert (trunk.record.num_skips, left.record.num_skips, right.record.num_skips) == (1, 2, 2)
    assert (len(left.lr_events), right.lr_events) == (1, ())
    assert [skip.batch_index for skip in right.skips()] == [1, 7]
    assert right.prefix_hash(3) != left.prefix_hash(3)
    check(right.rows)
    check(longer.rows)


def test_a_row_that_was_refused_leaves_no_trace() -> None:
    ledger = attempt(Ledger(), 0)
    row = dict(ledger.next_row("skip", {"batch_index": 1, "step": 1, "cause": "x"}, 0.0))
    with pytest.raises(LedgerError):
        ledger.append({**row, "hash": "0" * 16})
    assert len(ledger.append(row).rows) == 2
    assert len(ledger.rows) == 1


def test_appending_costs_the_same_however_long_the_ledger_is() -> None:
    """Counted in rows touched, not in seconds."""
    ledger = attempt(Ledger(), 0)
    for batch in range(300):
        ledger = skip(ledger, batch)
    log = ledger._log
    for batch in range(300, 310):
        ledger = skip(ledger, batch)
        assert ledger._log is log
        assert "rows" not in ledger.__dict__
    assert ledger.record.num_skips == 310
