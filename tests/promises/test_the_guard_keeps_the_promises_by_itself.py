"""Promises 2, 3, 4 and 7 with nobody scripting the guard: it refuses, investigates, skips and rolls back on its own account."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shard_copies import overwrite, with_shards
from surefoot.config.data import Exclusion, Shards
from surefoot.config.run import RunConfig
from surefoot.data.build import prepare
from surefoot.data.loader import Loader
from surefoot.monitor.compare import compare
from surefoot.monitor.run import Run
from surefoot.parallel.fork_launch import run_ranks
from surefoot.proof.rehearsal import Rehearsed, Script, rehearse, rehearse_on_rank
from tolerances import FP64_RANKS

STEPS = 40
"""Baselines judge from step 20 on."""
NAN_MAKER = 1
"""A byte that no text of ours holds; the tests make it come out of the embedding as NaN."""
CHANCE = ("consecutive_skips", "healthy_batches", "data_skips", "rejections")
"""What a guard counts about skipped steps, beside the baselines that they must not touch."""


@pytest.fixture
def longer(config: RunConfig, vary: Callable[..., RunConfig]) -> RunConfig:
    return vary(config, steps=STEPS, **{"guard.probe_every": 10})


@pytest.fixture
def skipping(longer: RunConfig, vary: Callable[..., RunConfig]) -> RunConfig:
    """The guard may leave out no document: what it refuses is skipped."""
    return vary(longer, **{"guard.max_exclusions": 0})


@pytest.fixture
def new_at_26(longer: RunConfig, loader: Loader) -> str:
    """A document that no batch before 26 reads, where the baselines stand."""
    for source, _, row in loader.sample_ids(26).tolist():
        for span in loader.row_documents(source, row):
            if loader.spans_read_before(span.document, 26) == 0:
                return span.document
    raise AssertionError("no document of batch 26 is new there; make the corpus larger")


def holding(config: RunConfig, folder: Path, document: str, tokens: np.ndarray[Any, np.dtype[np.int64]]) -> RunConfig:
    """The config reading shards in which the document holds these tokens."""
    changed = with_shards(config, prepare(config.data), folder)
    for source in changed.data.sources:
        assert isinstance(source.documents, Shards)
        overwrite(Path(source.documents.path), document, tokens)
    return changed


def garbage() -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.random.default_rng(0).integers(0, 256, 4096)


def text_with_nan_makers() -> np.ndarray[Any, np.dtype[np.int64]]:
    tokens = np.frombuffer(b"what was lost is counted before it is mended so that a run stands, " * 80, dtype=np.uint8)
    tokens = tokens.astype(np.int64)
    tokens[::9] = NAN_MAKER
    return tokens


def assert_same_but_for(batches: set[int], one: Path, other: Path) -> None:
    """Every row but those of these batches, of all that is computed."""
    mine, theirs = ({row["batch_index"]: row for row in Run(folder).rows} for folder in (one, other))
    assert mine.keys() == theirs.keys()
    for batch in mine.keys() - batches:
        for name in mine[batch].keys() | theirs[batch].keys():
            if not name.startswith("perf/") and name != "attempt":
                assert mine[batch].get(name) == theirs[batch].get(name), (batch, name)


def skipped(folder: Path) -> set[int]:
    return {skip.batch_index for skip in Run(folder).ledger.skips()}


# Promise 3


@pytest.mark.parametrize("what", [garbage, text_with_nan_makers])
def test_after_what_the_guard_refused_the_run_is_the_one_in_which_those_batches_predicted_nothing(
    skipping: RunConfig, new_at_26: str, tmp_path: Path, what: Callable[[], Any]
) -> None:
    """To the bit: weights, moments, counters, smoothed loss, baselines, and every other row with its scores."""
    changed = holding(skipping, tmp_path / "shards", new_at_26, what())
    guarded = rehearse(changed, tmp_path / "guarded", Script(poison_token=NAN_MAKER))
    gone = skipped(tmp_path / "guarded")
    assert 26 in gone
    assert guarded.reason == "done"
    empty = Script(poison_token=NAN_MAKER, empty_batches=tuple(gone))
    jumped = rehearse(changed, tmp_path / "jumped", empty)
    assert skipped(tmp_path / "jumped") == set()
    assert jumped.digests == guarded.digests
    assert (jumped.step, jumped.batch_index) == (guarded.step, guarded.batch_index)
    remembered = [{k: v for k, v in end.guard.items() if k not in CHANCE} for end in (jumped, guarded)]
    assert remembered[0] == remembered[1]
    assert_same_but_for(gone, tmp_path / "guarded", tmp_path / "jumped")


def test_the_document_that_did_it_is_named_decoded_and_the_data_are_blamed(
    skipping: RunConfig, new_at_26: str, tmp_path: Path
) -> None:
    changed = holding(skipping, tmp_path / "shards", new_at_26, text_with_nan_makers())
    rehearse(changed, tmp_path / "run", Script(poison_token=NAN_MAKER, stop_after=28))
    row = next(row for row in Run(tmp_path / "run").ledger.of_kind("skip") if row["batch_index"] == 26)
    assert row["diagnosis"]["cause"] == "data"
    assert row["suspects"][0]["document"] == new_at_26
    assert "counted" in row["suspects"][0]["text"]
    assert {"same_batch", "without_suspects"} <= {result["kind"] for result in row["passes"]}
    assert new_at_26 in row["cause"]


# Promise 4


@pytest.fixture(scope="module")
def unharmed(corpus: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Rehearsed, Path]:
    """The run without a fault."""
    from surefoot.proof.rehearsal import rehearsal

    config = rehearsal(*corpus, steps=STEPS)
    config = dataclasses.replace(config, guard=dataclasses.replace(config.guard, probe_every=10))
    folder = tmp_path_factory.mktemp("unharmed") / "run"
    return rehearse(config, folder), folder


@pytest.mark.parametrize("snapshots", [2, 0])
def test_a_flipped_bit_in_a_weight_is_rolled_back_and_the_end_is_that_of_the_run_without_it(
    longer: RunConfig,
    vary: Callable[..., RunConfig],
    unharmed: tuple[Rehearsed, Path],
    tmp_path: Path,
    snapshots: int,
) -> None:
    config = vary(longer, **{"guard.snapshots": snapshots})
    end = rehearse(config, tmp_path / "run", Script(flipped_at=30))
    ledger = Run(tmp_path / "run").ledger
    assert [attempt.reason for attempt in ledger.attempts] == ["start", "rollback"]
    assert ledger.attempts[-1].from_batch <= 30
    verdict = ledger.of_kind("verdict")[0]
    assert (verdict["action"], verdict["diagnosis"]["state_is_broken"]) == ("rollback", True)
    assert end.digests == unharmed[0].digests
    assert (end.step, end.batch_index, end.guard) == (
        unharmed[0].step,
        unharmed[0].batch_index,
        unharmed[0].guard,
    )
    found = compare(Run(unharmed[1]), Run(tmp_path / "run"))
    assert found.same, found.first_difference


@pytest.mark.parametrize("stop_after", [-1, 26, 30])
def test_a_run_whose_guard_leaves_a_document_out_is_the_run_that_never_had_it_whatever_it_held(
    longer: RunConfig, new_at_26: str, tmp_path: Path, stop_after: int
) -> None:
    """To the bit, baselines and scores too, and no batch is lost; also when it is stopped right after, and goes on from disk."""
    without = dataclasses.replace(longer.data, exclude=(Exclusion(document=new_at_26),))
    never = rehearse(dataclasses.replace(longer, data=without), tmp_path / "never")
    for name, what in (("garbage", garbage), ("nan", text_with_nan_makers)):
        changed = holding(longer, tmp_path / f"{name}-shards", new_at_26, what())
        if stop_after >= 0:
            rehearse(changed, tmp_path / name, Script(poison_token=NAN_MAKER, stop_after=stop_after))
        end = rehearse(changed, tmp_path / name, Script(poison_token=NAN_MAKER))
        ledger = Run(tmp_path / name).ledger
        (verdict,) = [row for row in ledger.of_kind("verdict") if row["action"] == "exclude"]
        assert (verdict["batch_index"], verdict["exclude"]) == (26, [new_at_26])
        assert verdict["spans_read_before"] == {new_at_26: 0}
        assert verdict["diagnosis"]["cured_without"]
        assert ledger.record.exclusions_at == (26,)
        assert ledger.record.rollbacks == ()
        assert skipped(tmp_path / name) == set()
        assert (end.digests, end.step, end.batch_index) == (never.digests, never.step, never.batch_index)
        assert end.guard == never.guard
        found = compare(Run(tmp_path / "never"), Run(tmp_path / name))
        assert found.same, found.first_difference


def test_a_rollback_that_excludes_what_the_guard_refused_equals_the_run_that_never_had_it(
    skipping: RunConfig, new_at_26: str, tmp_path: Path
) -> None:
    """Baselines and scores too, and whatever the excluded document holds."""
    script = Script(rollback_after=27, rollback_to=26, exclude=(new_at_26,), poison_token=NAN_MAKER)
    ends = []
    for name, what in (("garbage", garbage), ("nan", text_with_nan_makers)):
        changed = holding(skipping, tmp_path / f"{name}-shards", new_at_26, what())
        ends.append(rehearse(changed, tmp_path / name, script))
        assert [row["batch_index"] for row in Run(tmp_path / name).abandoned_rows if row.get("skipped")] == [26]
    without = dataclasses.replace(skipping.data, exclude=(Exclusion(document=new_at_26),))
    never = rehearse(dataclasses.replace(skipping, data=without), tmp_path / "never")
    for name, end in zip(("garbage", "nan"), ends, strict=True):
        assert (end.digests, end.step, end.batch_index) == (never.digests, never.step, never.batch_index)
        assert end.guard == never.guard
        found = compare(Run(tmp_path / "never"), Run(tmp_path / name))
        assert found.same, found.first_difference


def test_a_run_rolled_back_by_the_guard_and_then_stopped_goes_on_in_a_fresh_process_as_if_nothing_had_been(
    longer: RunConfig, unharmed: tuple[Rehearsed, Path], tmp_path: Path
) -> None:
    rehearse(longer, tmp_path / "run", Script(flipped_at=30, stop_after=33))
    assert len(Run(tmp_path / "run").ledger.record.rollbacks) == 1
    end = run_ranks(1, rehearse_on_rank, longer, tmp_path / "run")[0]
    assert end.digests == unharmed[0].digests
    assert end.guard == unharmed[0].guard
    assert compare(Run(unharmed[1]), Run(tmp_path / "run")).same


# Promise 2


@pytest.mark.parametrize("stop_after", [21, 25, 29])
def test_a_run_stopped_in_the_middle_of_its_baselines_judges_on_as_the_uninterrupted_one(
    skipping: RunConfig, new_at_26: str, tmp_path: Path, stop_after: int
) -> None:
    """Scores, findings, diagnoses and baselines; stopped before, right before and after the batches that are refused."""
    changed = holding(skipping, tmp_path / "shards", new_at_26, garbage())
    whole = rehearse(changed, tmp_path / "whole")
    rehearse(changed, tmp_path / "parts", Script(stop_after=stop_after))
    last = rehearse(changed, tmp_path / "parts")
    assert last.digests == whole.digests
    assert last.guard == whole.guard
    found = compare(Run(tmp_path / "whole"), Run(tmp_path / "parts"))
    assert found.same, found.first_difference
    decided = [
        [{k: v for k, v in d.row.items() if k not in ("n", "time", "hash")} for d in Run(folder).ledger.decisions.all()]
        for folder in (tmp_path / "whole", tmp_path / "parts")
    ]
    assert decided[0] == decided[1]
    assert any(row["kind"] == "skip" and row.get("passes") for row in decided[0])


# Promise 7, on two ranks


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_a_nan_on_one_of_two_ranks_costs_one_batch_and_every_rank_decides_the_same(
    longer: RunConfig, vary: Callable[..., RunConfig], tmp_path: Path, layout: str
) -> None:
    config = vary(longer, steps=30, **{"parallel.precision": "fp64", "parallel.data_parallel": layout})
    alone = rehearse(config, tmp_path / "one", Script(nan_activation_batches=(24,), nan_ranks=(0,)))
    script = Script(nan_activation_batches=(24,), nan_ranks=(1,))
    both = run_ranks(2, rehearse_on_rank, config, tmp_path / "two", script)
    assert [(end.step, end.batch_index, end.reason) for end in both] == [(30, 31, "done")] * 2
    assert both[0].ledger == both[1].ledger
    assert both[0].guard == both[1].guard
    assert both[0].digests == both[1].digests
    assert skipped(tmp_path / "two") == skipped(tmp_path / "one") == {24}
    row = Run(tmp_path / "two").ledger.of_kind("skip")[0]
    assert [result["kind"] for result in row["passes"]] == ["same_batch"]
    assert row["diagnosis"]["cause"] == "hardware"
    for name, tensor in alone.tensors.items():
        scale = max(float(np.linalg.norm(tensor)), 1e-300)
        assert np.linalg.norm(tensor - both[0].tensors[name]) / scale < FP64_RANKS, name
