"""Promise 4: a rollback to batch c that excludes documents X is the run that never had them."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

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

NAN_MAKER = 1
"""A byte that no text of ours holds; the tests make it come out of the embedding as NaN."""


@pytest.fixture(params=[True, False], ids=["document_mask", "whole_rows"])
def untied(config: RunConfig, vary: Callable[..., RunConfig], request: pytest.FixtureRequest) -> RunConfig:
    """Input and output embeddings apart, so that a NaN input embedding harms only what reads it."""
    return vary(config, **{"model.tie_embeddings": False, "data.document_mask": request.param})


@pytest.fixture
def script(late_document: str) -> Script:
    """Goes back to the snapshot before batch 12 once batch 17 is through, without one of the documents that 17 was first to read."""
    return Script(rollback_after=17, rollback_to=14, exclude=(late_document,), poison_token=NAN_MAKER)


def test_without_the_mask_tokens_attend_across_documents(
    config: RunConfig, vary: Callable[..., RunConfig], tmp_path: Path
) -> None:
    short = vary(config, steps=5)
    masked = rehearse(short, tmp_path / "masked")
    across = rehearse(vary(short, **{"data.document_mask": False}), tmp_path / "across")
    assert masked.digests["weights/embedding.weight"] != across.digests["weights/embedding.weight"]


def assert_same_run(one: Rehearsed, other: Rehearsed, folder_one: Path, folder_other: Path) -> None:
    """Weights, moments, counters and every surviving row: losses, norms, evaluations, sample digests."""
    assert one.digests == other.digests
    assert (one.step, one.batch_index) == (other.step, other.batch_index)
    found = compare(Run(folder_one), Run(folder_other))
    assert found.same, found.first_difference


def test_a_rollback_equals_a_fresh_process_that_never_ran_the_bad_path(
    untied: RunConfig, script: Script, tmp_path: Path
) -> None:
    rolled = rehearse(untied, tmp_path / "rolled", script)
    rollback = Run(tmp_path / "rolled").attempts[-1]
    assert (rollback.reason, rollback.checkpoint, rollback.from_batch) == ("rollback", "snapshot", 12)
    assert [item.from_batch for item in rollback.exclude] == [script.rollback_to]
    excluded = (Exclusion(document=script.exclude[0], from_batch=script.rollback_to),)
    clean = dataclasses.replace(untied, data=dataclasses.replace(untied.data, exclude=excluded))
    poison = Script(poison_token=NAN_MAKER)
    rehearse(clean, tmp_path / "clean", dataclasses.replace(poison, stop_after=script.rollback_to - 1))
    assert Run(tmp_path / "clean").ledger.surviving_checkpoints()[-1].batch_index == script.rollback_to
    fresh = run_ranks(1, rehearse_on_rank, clean, tmp_path / "clean", poison)[0]
    assert_same_run(rolled, fresh, tmp_path / "rolled", tmp_path / "clean")
    assert any(row.get("excluded") for row in Run(tmp_path / "rolled").rows)


@pytest.mark.parametrize("replacement", ["other text", "NaN makers"])
def test_what_the_excluded_documents_hold_makes_no_difference(
    untied: RunConfig, script: Script, tmp_path: Path, replacement: str
) -> None:
    data = prepare(untied.data)
    original = with_shards(untied, data, tmp_path / "original")
    changed = with_shards(untied, data, tmp_path / "changed")
    for source in changed.data.sources:
        assert isinstance(source.documents, Shards)
        overwrite(
            Path(source.documents.path), script.exclude[0], NAN_MAKER if replacement == "NaN makers" else ord("z")
        )
    one = rehearse(original, tmp_path / "one", script)
    other = rehearse(changed, tmp_path / "other", script)
    assert (tmp_path / "one" / "attempts" / "0001" / "metrics.jsonl").read_bytes() != (
        tmp_path / "other" / "attempts" / "0001" / "metrics.jsonl"
    ).read_bytes()
    bad = [row for row in Run(tmp_path / "other").abandoned_rows if row.get("skipped")]
    assert bad or replacement != "NaN makers", "the NaN makers must do harm before they are excluded"
    assert_same_run(one, other, tmp_path / "one", tmp_path / "other")


def test_a_rollback_equals_a_run_from_step_0_without_the_documents(
    untied: RunConfig, script: Script, tmp_path: Path
) -> None:
    rolled = rehearse(untied, tmp_path / "rolled", script)
    without = (Exclusion(document=script.exclude[0], from_batch=0),)
    clean = dataclasses.replace(untied, data=dataclasses.replace(untied.data, exclude=without))
    never = rehearse(clean, tmp_path / "clean", Script(poison_token=NAN_MAKER))
    assert_same_run(rolled, never, tmp_path / "rolled", tmp_path / "clean")


@pytest.mark.parametrize("stop_after", [12, 14, 16])
def test_it_does_not_matter_which_states_happened_to_be_kept(
    config: RunConfig, late_document: str, tmp_path: Path, stop_after: int
) -> None:
    """A run that was stopped has other snapshots than one that was not, and goes back to another state."""
    script = Script(rollback_after=17, rollback_to=14, exclude=(late_document,))
    through = rehearse(config, tmp_path / "through", script)
    rehearse(config, tmp_path / "stopped", Script(stop_after=stop_after))
    stopped = rehearse(config, tmp_path / "stopped", script)
    froms = [Run(tmp_path / name).attempts[-1].from_batch for name in ("through", "stopped")]
    assert froms[0] != froms[1]
    assert_same_run(through, stopped, tmp_path / "through", tmp_path / "stopped")


def test_a_second_rollback_keeps_what_the_first_excluded(config: RunConfig, loader: Loader, tmp_path: Path) -> None:
    first = next(span.document for span in loader.row_documents(*loader.sample_ids(13)[0, [0, 2]].tolist()))
    second = next(span.document for span in loader.row_documents(*loader.sample_ids(18)[1, [0, 2]].tolist()))
    rehearse(config, tmp_path / "run", Script(rollback_after=13, rollback_to=12, exclude=(first,), stop_after=16))
    again = rehearse(
        config, tmp_path / "run", Script(rollback_after=18, rollback_to=17, exclude=(second,), rollbacks=2)
    )
    excluded = (Exclusion(document=first, from_batch=12), Exclusion(document=second, from_batch=17))
    clean = dataclasses.replace(config, data=dataclasses.replace(config.data, exclude=excluded))
    never = rehearse(clean, tmp_path / "clean")
    assert_same_run(again, never, tmp_path / "run", tmp_path / "clean")


@pytest.mark.parametrize(("snapshots", "restored"), [(2, "snapshot"), (0, "")])
def test_a_rollback_to_the_first_batch_starts_from_the_initial_weights(
    config: RunConfig, loader: Loader, tmp_path: Path, snapshots: int, restored: str
) -> None:
    config = dataclasses.replace(config, guard=dataclasses.replace(config.guard, snapshots=snapshots))
    document = next(span.document for span in loader.row_documents(*loader.sample_ids(2)[0, [0, 2]].tolist()))
    rolled = rehearse(config, tmp_path / "run", Script(rollback_after=3, rollback_to=0, exclude=(document,)))
    without = dataclasses.replace(config.data, exclude=(Exclusion(document=document),))
    never = rehearse(dataclasses.replace(config, data=without), tmp_path / "clean")
    assert Run(tmp_path / "run").attempts[-1].checkpoint == restored
    assert_same_run(rolled, never, tmp_path / "run", tmp_path / "clean")


def test_the_ledger_says_how_many_spans_were_read_before_the_rollbacks_target(
    config: RunConfig, script: Script, loader: Loader, tmp_path: Path
) -> None:
    early = next(
        span.document for source, _, row in loader.sample_ids(2).tolist() for span in loader.row_documents(source, row)
    )
    exclude = (script.exclude[0], early)
    rehearse(config, tmp_path / "run", Script(rollback_after=17, rollback_to=14, exclude=exclude))
    verdict = Run(tmp_path / "run").ledger.of_kind("verdict")[0]
    assert verdict["spans_read_before"] == {
        script.exclude[0]: 0,
        early: loader.spans_read_before(early, 14),
    }
    assert verdict["spans_read_before"][early] > 0
