"""A row that was read before under another number is known for it before the update."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surefoot.config.data import Exclusion
from surefoot.config.run import RunConfig
from surefoot.data.build import prepare
from surefoot.data.loader import Batch, Loader
from surefoot.data.pack import BLANK
from surefoot.monitor.run import Run
from surefoot.monitor.step_report import StepReport
from surefoot.parallel.digest import digest_tensors
from surefoot.parallel.fork_launch import run_ranks
from surefoot.parallel.mesh import World, join_world
from surefoot.proof.data_faults import same_rows, skip_healthy, spoil_with
from surefoot.proof.faults import Bench, Dose
from surefoot.proof.rehearsal import Script, rehearse
from surefoot.train import loop, row_memory
from surefoot.train.interrupt import StopRequest
from surefoot.train.loop import train
from surefoot.train.row_memory import RowMemory, entries, oldest, row_hashes
from surefoot.train.run import open_run

ONSET = 30
"""Baselines judge from step 20 on, shares of tokens from step 16 on."""
NUM_SPOILED = 6


class RepeatingLoader(Loader):
    """From ``onset`` on some rows of a batch hold those of batch 3, more of them in some batches than in others."""

    def __init__(self, inner: Loader, onset: int) -> None:
        vars(self).update(vars(inner))
        self.inner, self.onset = inner, onset

    def batch(self, batch_index: int, exclusions: Sequence[Exclusion] = (), rank: int = 0, world: int = 1) -> Batch:
        batch = self.inner.batch(batch_index, exclusions)
        tokens, num = batch.tokens_BT.copy(), len(batch.samples_B3)
        if batch_index >= self.onset:
            again = batch_index % num
            tokens[:again] = self.inner.batch(3).tokens_BT[:again]
        mine = slice(rank * num // world, (rank + 1) * num // world)
        return dataclasses.replace(batch, tokens_BT=tokens[mine], documents_BT=batch.documents_BT[mine])


def opened_loader(config: RunConfig) -> Loader:
    return Loader(config.data, prepare(config.data), config.seed)


@pytest.fixture
def alone(config: RunConfig) -> World:
    return join_world(config.parallel)


@pytest.fixture
def repeating(config: RunConfig, vary: Callable[..., RunConfig]) -> RepeatingLoader:
    return RepeatingLoader(opened_loader(vary(config, **{"data.batch_size": 5})), 20)


def shares(loader: Loader, batches: Sequence[int], world: World, memory: RowMemory | None = None) -> list[float]:
    memory = memory or RowMemory()
    return [memory.duplicated(loader.batch(i, (), world.rank, world.size), loader, (), world) for i in batches]


def by_hand(loader: Loader, batch_index: int) -> float:
    """By comparing every row with every other one."""

    def rows(index: int) -> list[tuple[bytes, tuple[int, int]]]:
        batch = loader.batch(index)
        return [
            (row.tobytes(), (sample[0], sample[2]))
            for row, documents, sample in zip(
                batch.tokens_BT, batch.documents_BT, batch.samples_B3.tolist(), strict=True
            )
            if (documents == BLANK).mean() <= 0.5 and len(set(row.tolist())) > 1
        ]

    now = rows(batch_index)
    seen = [row for index in range(max(0, batch_index - 64), batch_index + 1) for row in rows(index)]
    count = sum(any(held == row and name != other for row, other in seen) for held, name in now)
    return count / len(loader.batch(batch_index).samples_B3)


def test_the_share_is_that_of_the_rows_that_hold_what_a_row_of_another_number_held(
    repeating: RepeatingLoader, alone: World
) -> None:
    """Batch 3 is out of reach from batch 68 on: there copies are known by other copies."""
    found = shares(repeating, range(75), alone)
    assert found == [by_hand(repeating, index) for index in range(75)]
    assert found[:20] == [0.0] * 20
    assert {0.0, 0.2, 0.4, 0.6, 0.8} == set(found[20:])


def test_two_of_a_kind_in_one_batch_both_count(loader: Loader, alone: World) -> None:
    batch = loader.batch(0)
    tokens = batch.tokens_BT.copy()
    tokens[3] = tokens[0]
    twice = dataclasses.replace(batch, tokens_BT=tokens)
    assert RowMemory().duplicated(twice, loader, (), alone) == 0.5
    samples = batch.samples_B3.copy()
    samples[3] = [1 - samples[0, 0], *samples[0, 1:]]
    assert RowMemory().duplicated(dataclasses.replace(twice, samples_B3=samples), loader, (), alone) == 0.5, "sources"
    samples[3] = samples[0]
    assert RowMemory().duplicated(dataclasses.replace(twice, samples_B3=samples), loader, (), alone) == 0.0


def test_an_epoch_that_reads_its_rows_again_does_not_count(
    config: RunConfig, vary: Callable[..., RunConfig], alone: World
) -> None:
    loader = opened_loader(vary(config, **{"data.batch_size": 32}))
    read = [(source, row) for index in range(40) for source, _, row in loader.sample_ids(index).tolist()]
    assert len(set(read)) < len(read) - 100
    assert set(shares(loader, range(40), alone)) == {0.0}


def test_rows_that_are_blank_or_one_token_over_and_over_do_not_count(loader: Loader, alone: World) -> None:
    batch = loader.batch(0)
    plain = dataclasses.replace(batch, tokens_BT=np.full_like(batch.tokens_BT, 32))
    assert RowMemory().duplicated(plain, loader, (), alone) == 0.0
    same = np.repeat(batch.tokens_BT[:1], 4, axis=0)
    for blank, share in ((33, 0.0), (32, 1.0)):
        documents = batch.documents_BT.copy()
        documents[:, :blank] = BLANK
        documents[:, blank:] = 0
        half = dataclasses.replace(batch, tokens_BT=same, documents_BT=documents)
        assert RowMemory().duplicated(half, loader, (), alone) == share, "64 tokens a row"


def test_a_memory_that_begins_late_or_goes_back_says_what_one_that_read_everything_does(
    repeating: RepeatingLoader, alone: World
) -> None:
    whole = RowMemory()
    told = shares(repeating, range(50), alone, whole)
    assert told[34] > 0
    for start in (24, 34, 47):
        assert shares(repeating, range(start, 50), alone) == told[start:]
    assert shares(repeating, range(23, 50), alone, whole) == told[23:], "back"
    assert shares(repeating, [10, 44], alone) == [told[10], told[44]], "a jump"


def test_what_was_read_before_an_exclusion_is_read_again_under_it(repeating: RepeatingLoader, alone: World) -> None:
    """The documents of the row that comes again are blanked where it was read first: its copy is the first one now."""
    source, _, row = repeating.sample_ids(3)[0].tolist()
    for since, share in ((0, 0.0), (3, 0.0), (4, 0.2)):
        gone = tuple(
            Exclusion(document=span.document, from_batch=since) for span in repeating.row_documents(source, row)
        )
        memory = RowMemory()
        shares(repeating, range(21), alone, memory)
        assert memory.duplicated(repeating.batch(21, gone), repeating, gone, alone) == share
    assert shares(repeating, [21], alone) == [0.2]


def test_a_memory_that_follows_the_run_reads_nothing_again(
    repeating: RepeatingLoader, alone: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = [repeating.batch(index) for index in range(75)]
    monkeypatch.setattr(RepeatingLoader, "batch", lambda *_: pytest.fail("read again"))
    memory = RowMemory()
    for batch in batches:
        memory.duplicated(batch, repeating, (), alone)
    assert len(memory.read) == 65


def shares_on_rank(rank: int, world: int, config: RunConfig) -> tuple[list[float], list[int]]:
    """The shares, and the hashes of a batch of all ranks."""
    loader, joined = RepeatingLoader(opened_loader(config), 20), join_world(config.parallel)
    hashes, _ = entries(loader.batch(25, (), rank, world), joined)
    return shares(loader, range(15, 40), joined), hashes.tolist()


@pytest.mark.parametrize("world", [2, 3])
def test_every_rank_says_what_one_rank_alone_says(
    config: RunConfig, vary: Callable[..., RunConfig], repeating: RepeatingLoader, alone: World, world: int
) -> None:
    told = run_ranks(world, shares_on_rank, vary(config, **{"data.batch_size": 5}))
    hashes, _ = entries(repeating.batch(25), alone)
    assert told == [(shares(repeating, range(15, 40), alone), hashes.tolist())] * world


def test_rows_are_told_apart_by_one_token_and_by_the_order_of_their_tokens() -> None:
    row = np.random.default_rng(0).integers(0, 50_000, 256)
    others = [np.roll(row, 1), row[::-1]]
    for at in range(256):
        other = row.copy()
        other[at] += 1
        others.append(other)
    assert len(set(row_hashes(np.stack([row, *others])).tolist())) == 259
    assert row_hashes(row[None]) == row_hashes(np.stack([others[0], row]))[1:]


def test_large_batches_are_remembered_for_fewer_batches(
    config: RunConfig, vary: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = opened_loader(vary(config, **{"data.batch_size": 8}))
    assert oldest(100, loader) == 36
    monkeypatch.setattr(row_memory, "MOST_ROWS", 40)
    assert oldest(20, loader) == 15, "five batches of 8 rows"
    monkeypatch.setattr(row_memory, "MOST_ROWS", 4)
    assert (oldest(20, loader), oldest(0, loader)) == (19, 0)


# In a run


class _StopAfter:
    """Asks the run to stop after a batch; the stop rides in the reduction of the next, so it is asked one batch early."""

    def __init__(self, batch_index: int, stop: StopRequest) -> None:
        self.batch_index, self.stop = batch_index, stop

    def step(self, report: StepReport) -> None:
        if report.batch_index == self.batch_index - 1:
            self.stop.signal = 15


def ended(
    config: RunConfig, folder: Path, arm: Callable[[Bench], Bench], stop_after: int = -1
) -> tuple[dict[str, int], dict[str, Any]]:
    """Digests of all tensors, and what the guard remembers."""
    with open_run(config, folder, join_world(config.parallel), notify=lambda kind, row: None, peak=0.0) as run:
        bench, stop = arm(Bench(run.setup, run.state, run.data)), StopRequest()
        watchers = (_StopAfter(stop_after, stop),)
        train(run.state, bench.setup, bench.data, run.keeping, stop=stop, watchers=watchers)
        return digest_tensors(run.state.tensors()), run.state.guard.to_dict()


def twice_written(bench: Bench) -> Bench:
    """Two rows again and again, from ``ONSET`` on."""
    return spoil_with(same_rows, bench, Dose(onset=ONSET, length=NUM_SPOILED, magnitude=2.0))


def test_a_shard_written_twice_is_refused_from_its_first_batch_to_its_last_and_the_run_goes_on_as_if_it_were_empty(
    config: RunConfig, vary: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = vary(config, steps=40)
    # A loader that lies is found out when a run is resumed; shards that were written twice are not.
    monkeypatch.setattr(loop, "prove_first_batch", lambda *_: None)
    weights, remembered = ended(config, tmp_path / "run", twice_written)
    spoiled = list(range(ONSET, ONSET + NUM_SPOILED))
    run = Run(tmp_path / "run")
    assert [skip.batch_index for skip in run.ledger.skips()] == spoiled
    for row in run.ledger.of_kind("skip"):
        assert row["diagnosis"]["cause"] == "data"
        assert "were read before under another name in the last 64 batches" in row["cause"]
        assert row["findings"][0]["where"] == "duplicated"
    told = {row["batch_index"]: row["data/duplicated"] for row in run.rows}
    assert [told[batch] for batch in spoiled] == [1.0] * NUM_SPOILED
    assert {share for batch, share in told.items() if batch not in spoiled} == {0.0}
    control, _ = ended(config, tmp_path / "empty", lambda bench: skip_healthy(bench, spoiled))
    assert weights == control

    part = tmp_path / "parts"
    ended(config, part, twice_written, stop_after=ONSET + 2)
    assert Run(part).rows[-1]["batch_index"] == ONSET + 2
    assert ended(config, part, twice_written) == (weights, remembered)
    assert {row["batch_index"]: row["data/duplicated"] for row in Run(part).rows} == told


def test_an_observed_run_says_so_and_learns_from_it(
    config: RunConfig, vary: Callable[..., RunConfig], tmp_path: Path
) -> None:
    config = vary(config, steps=34, **{"guard.policy": "observe"})
    ended(config, tmp_path / "run", twice_written)
    run = Run(tmp_path / "run")
    assert not run.ledger.skips()
    texts = [row["text"] for row in run.ledger.of_kind("verdict") if row["batch_index"] >= ONSET]
    assert "100% of the rows were read before under another name" in texts[0]


def test_a_fault_right_after_a_resume_goes_back_to_where_the_run_was_resumed(
    config: RunConfig, vary: Callable[..., RunConfig], tmp_path: Path
) -> None:
    for snapshots in (2, 0):
        config = vary(config, **{"guard.snapshots": snapshots})
        folder = tmp_path / str(snapshots)
        rehearse(config, folder, Script(stop_after=13))
        rehearse(config, folder, Script(rollback_after=14, rollback_to=14))
        back = Run(folder).ledger.attempts[-1]
        assert (back.from_batch == 14, back.checkpoint == "snapshot") == (snapshots > 0, snapshots > 0)
