"""What an investigation brings back, and that it leaves nothing behind."""

import dataclasses
import math
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from surefoot.config.data import Exclusion
from surefoot.config.run import RunConfig
from surefoot.data.loader import Batch, Loader
from surefoot.data.pack import IGNORE
from surefoot.data.tokenizer import ByteTokenizer
from surefoot.guard.actions import Investigate
from surefoot.guard.evidence import Evidence
from surefoot.guard.finding import Finding
from surefoot.guard.guard import GuardState, Verdict
from surefoot.guard.limits import Limits
from surefoot.parallel.digest import digest_tensors
from surefoot.parallel.fork_launch import run_ranks
from surefoot.parallel.mesh import World, join_world
from surefoot.proof.faults import with_nan_gradients
from surefoot.proof.rehearsal import Script, rehearse
from surefoot.train import investigate as investigating
from surefoot.train import loop
from surefoot.train.acting import Judged
from surefoot.train.candidates import candidates, half, without_documents
from surefoot.train.investigate import Applied, Recent, can_widen, investigate, one_pass, token_losses, widened
from surefoot.train.run import OpenRun, open_run
from surefoot.train.setup import Setup, set_up
from surefoot.train.state import TrainState
from surefoot.train.step import StepOutcome, train_step
from tolerances import FP64_ORDER, FP64_RANKS

ALONE = World(rank=0, size=1, device=torch.device("cpu"), mesh=None)
NOT_KNOWN = (math.nan, math.nan)


def ignore(kind: str, row: Mapping[str, Any]) -> None:
    return None


def refused(batch: Batch, state: TrainState, setup: Setup) -> StepOutcome:
    """The step, refused whatever it holds."""
    outcome = train_step(state, batch, setup, limits=Limits(loss=0.0))
    assert outcome.skipped
    return outcome


def asked(batch: Batch, outcome: StepOutcome, *kinds: str) -> Judged:
    findings = tuple(
        Finding(kind=kind, severity="alarm", text="seen", batch_index=batch.batch_index, onset=0, value=1.0)  # type: ignore[arg-type]
        for kind in kinds
    )
    return Judged(
        batch, outcome, GuardState(), Verdict(state=GuardState(), action=Investigate(cause="seen"), findings=findings)
    )


def every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """All six passes, one after the other."""
    kinds = ("same_batch", "healthy_batch", "without_suspects", "first_half", "second_half", "full_precision")
    monkeypatch.setattr(
        investigating,
        "next_pass",
        lambda evidence, budget: kinds[len(evidence.results)] if len(evidence.results) < budget else None,
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_investigation_leaves_no_trace_but_dropped_gradients(
    config: RunConfig,
    vary: Callable[..., RunConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    precision: str,
) -> None:
    every_kind(monkeypatch)
    config = vary(config, **{"parallel.precision": precision})
    with open_run(config, tmp_path / "run", ALONE, notify=ignore, peak=0.0) as run:
        for index in range(3):
            train_step(run.state, run.data.loader.batch(index), run.setup)
        batch = run.data.loader.batch(3)
        judged = asked(batch, refused(batch, run.state, run.setup), "too_good")
        before = (digest_tensors(run.state.tensors()), run.state.counters())
        of_optimizer = [float(rule.step_count()) for rule in run.state.optimizer.rules]
        draws = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())
        arrays = [batch.tokens_BT.copy(), batch.targets_BT.copy(), batch.documents_BT.copy()]
        evidence = investigate(judged, 6, Recent(), run.state, run.setup, run.data, run.keeping)
        assert [result.kind for result in evidence.results][-1] == "full_precision"
        assert len(evidence.results) == 6
        assert (digest_tensors(run.state.tensors()), run.state.counters()) == before
        assert [float(rule.step_count()) for rule in run.state.optimizer.rules] == of_optimizer
        assert torch.equal(torch.get_rng_state(), draws[0])
        assert (random.getstate(), np.random.get_state()[1].tolist()) == draws[1:]
        assert all(p.grad is None for p in run.state.parameters.values())
        for array, was in zip((batch.tokens_BT, batch.targets_BT, batch.documents_BT), arrays, strict=True):
            assert np.array_equal(array, was)
        assert run.state.model.compute_dtype == run.state.model.embedding.compute_dtype  # type: ignore[union-attr]
        assert len(run.keeping.ledger.rows) == 1


def test_the_same_batch_again_has_the_bits_of_the_step_and_after_a_transient_fault_other_ones(
    config: RunConfig, loader: Loader
) -> None:
    setup, state = set_up(config, ALONE)
    outcome = refused(loader.batch(0), state, setup)
    assert one_pass(state, loader.batch(0), setup) == (outcome.signals.loss, outcome.signals.gradient_norm)
    faulty = with_nan_gradients(setup, state, {1})
    outcome = refused(loader.batch(1), state, faulty)
    assert math.isnan(outcome.signals.gradient_norm)
    loss, norm = one_pass(state, loader.batch(1), faulty)
    assert loss == outcome.signals.loss
    assert math.isfinite(norm)


def opened_after(run: OpenRun, count: int) -> tuple[Batch, StepOutcome]:
    """The refused batch after so many applied ones."""
    for index in range(count):
        train_step(run.state, run.data.loader.batch(index), run.setup)
    batch = run.data.loader.batch(count)
    return batch, refused(batch, run.state, run.setup)


def test_every_pass_is_what_its_name_says(config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every_kind(monkeypatch)
    monkeypatch.setattr(investigating, "accused", lambda evidence: evidence.suspects[:2])
    with open_run(config, tmp_path / "run", ALONE, notify=ignore, peak=0.0) as run:
        batch, outcome = opened_after(run, 5)
        recent = Recent(applied=Applied(4, 3.5, 1.5), known=True)
        evidence = investigate(asked(batch, outcome), 6, recent, run.state, run.setup, run.data, run.keeping)
        by_kind = {result.kind: result for result in evidence.results}
        assert by_kind["same_batch"].same_bits
        healthy = by_kind["healthy_batch"]
        assert (healthy.loss, healthy.gradient_norm) == one_pass(run.state, run.data.loader.batch(4), run.setup)
        assert healthy.excess == healthy.loss - 3.5
        assert healthy.gradient_before == 1.5
        excluded = [Exclusion(document=suspect.document) for suspect in evidence.suspects[:2]]
        without = run.data.loader.batch(5, excluded)
        assert 0 < without.num_targets < batch.num_targets
        removed = by_kind["without_suspects"]
        assert (removed.loss, removed.gradient_norm) == one_pass(run.state, without, run.setup)
        halves = by_kind["first_half"].loss, by_kind["second_half"].loss
        counts = [np.count_nonzero(rows != IGNORE) for rows in (batch.targets_BT[:2], batch.targets_BT[2:])]
        assert np.dot(halves, counts) / sum(counts) == pytest.approx(outcome.signals.loss, rel=1e-6)
        assert halves[0] != halves[1]


@pytest.mark.parametrize("mask", [True, False])
def test_suspects_are_blanked_exactly_as_an_exclusion_would(
    config: RunConfig, vary: Callable[..., RunConfig], loader: Loader, mask: bool
) -> None:
    loader = Loader(vary(config, **{"data.document_mask": mask}).data, loader.prepared, config.seed)
    source, _, row = loader.sample_ids(6)[2].tolist()
    documents = tuple(span.document for span in loader.row_documents(source, row))[:1]
    expected = loader.batch(6, [Exclusion(document=document) for document in documents])
    found = without_documents(loader.batch(6), documents, loader, ALONE)
    for name in ("tokens_BT", "targets_BT", "documents_BT", "positions_BT"):
        assert np.array_equal(getattr(found, name), getattr(expected, name)), name
    assert found.num_targets == expected.num_targets < loader.batch(6).num_targets


def test_halves_are_rows_blanked_whole_and_a_single_row_goes_by_its_rank(loader: Loader) -> None:
    batch = loader.batch(2)
    first, second = half(batch, 0, 256, 0), half(batch, 1, 256, 0)
    assert np.array_equal(first.targets_BT[:2], batch.targets_BT[:2])
    assert np.array_equal(second.tokens_BT[2:], batch.tokens_BT[2:])
    assert (first.targets_BT[2:] == IGNORE).all()
    assert (second.documents_BT[:2] == -1).all()
    assert first.num_targets + second.num_targets == batch.num_targets
    single = loader.batch(2, (), 1, 4)
    assert half(single, 0, 256, 1).num_targets == 0
    assert half(single, 1, 256, 1).num_targets == single.num_targets


def losses_with(batch: Batch, row: int, number: int, value: float) -> torch.Tensor:
    """Made-up losses of 3 nats a token, one piece with another."""
    losses = np.full(batch.tokens_BT.shape, 3.0)
    losses[row, batch.documents_BT[row] == number] = value
    return torch.from_numpy(losses)


@pytest.mark.parametrize("value", [9.0, 0.1, math.nan, math.inf])
def test_the_document_whose_loss_is_far_off_either_way_or_not_finite_is_the_first_candidate(
    loader: Loader, value: float
) -> None:
    batch = loader.batch(3)
    row = 1
    number = int(np.bincount(batch.documents_BT[row][batch.documents_BT[row] >= 0]).argmax())
    source, _, source_row = batch.samples_B3[row].tolist()
    losses = losses_with(batch, row, number, value)
    found = candidates(batch, losses, loader, ByteTokenizer(), lambda domain: (3.0, 0.3), ALONE)[0]
    span = loader.row_documents(source, source_row)[number]
    held = batch.tokens_BT[row, span.offset : span.offset + span.stop - span.start]
    assert (found.document, found.row) == (span.document, row)
    assert found.domain == loader.data.sources[source].name
    assert found.tokens == tuple(held.tolist())
    assert found.text == ByteTokenizer().decode(held.tolist())
    assert found.loss == pytest.approx(value) or (math.isnan(found.loss) and not math.isfinite(value))
    unknown = candidates(batch, losses, loader, ByteTokenizer(), lambda domain: NOT_KNOWN, ALONE)
    assert unknown[0].document == span.document


def test_blanked_documents_are_no_candidates(loader: Loader) -> None:
    whole = candidates(
        loader.batch(3), losses_with(loader.batch(3), 0, 0, 9.0), loader, ByteTokenizer(), lambda d: NOT_KNOWN, ALONE
    )
    gone = loader.batch(3, [Exclusion(document=whole[0].document)])
    left = candidates(gone, losses_with(gone, 0, 0, 9.0), loader, ByteTokenizer(), lambda domain: NOT_KNOWN, ALONE)
    assert whole[0].document not in {candidate.document for candidate in left}


def test_full_precision_is_the_fp32_run_of_the_same_weights(
    config: RunConfig, vary: Callable[..., RunConfig], loader: Loader
) -> None:
    (low, low_state), (full, full_state) = (
        set_up(vary(config, **{"parallel.precision": precision}), ALONE) for precision in ("bf16", "fp32")
    )
    with widened(low_state):
        widely = one_pass(low_state, loader.batch(0), low)
    assert widely == one_pass(full_state, loader.batch(0), full)
    assert one_pass(low_state, loader.batch(0), low) != widely


def test_full_precision_is_offered_only_where_it_is_another_and_weights_are_whole(
    config: RunConfig, vary: Callable[..., RunConfig]
) -> None:
    pair = dataclasses.replace(ALONE, size=2)
    bf16 = vary(config, **{"parallel.precision": "bf16", "parallel.data_parallel": "fsdp"})
    assert can_widen(bf16, ALONE)
    assert not can_widen(bf16, pair)
    assert can_widen(vary(bf16, **{"parallel.data_parallel": "ddp"}), pair)
    assert not can_widen(config, ALONE)


def found_on(rank: int, world: int, config: RunConfig, folder: Path) -> tuple[Evidence, list[float]]:
    """An investigation of batch 5 and the step after it."""
    here = join_world(config.parallel)
    with open_run(config, folder, here, notify=ignore, peak=0.0) as run, pytest.MonkeyPatch.context() as patch:
        every_kind(patch)
        for index in range(5):
            train_step(run.state, run.data.loader.batch(index, (), rank, world), run.setup)
        batch = run.data.loader.batch(5, (), rank, world)
        judged = asked(batch, refused(batch, run.state, run.setup), "too_good")
        recent = Recent(applied=Applied(4, 3.5, 1.5), known=True)
        evidence = investigate(judged, 5, recent, run.state, run.setup, run.data, run.keeping)
        after = train_step(run.state, run.data.loader.batch(6, (), rank, world), run.setup)
        losses = token_losses(batch, run.setup)
        return evidence, [after.signals.loss, after.signals.gradient_norm, float(losses.sum())]


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_two_ranks_bring_back_the_same_evidence_which_is_that_of_one(
    config: RunConfig, vary: Callable[..., RunConfig], tmp_path: Path, layout: str
) -> None:
    config = vary(config, **{"parallel.precision": "fp64", "parallel.data_parallel": layout})
    alone, after = found_on(0, 1, config, tmp_path / "one")
    both = run_ranks(2, found_on, config, tmp_path / "two")
    assert repr(both[0][0]) == repr(both[1][0])
    evidence = both[0][0]
    assert [s.document for s in evidence.suspects] == [s.document for s in alone.suspects]
    assert evidence.results[0].same_bits
    for mine, theirs in zip(alone.results, evidence.results, strict=True):
        if "half" not in mine.kind:  # each rank has its own halves
            assert theirs.loss == pytest.approx(mine.loss, rel=FP64_RANKS)
            assert theirs.gradient_norm == pytest.approx(mine.gradient_norm, rel=FP64_RANKS)
    assert both[0][1][:2] == pytest.approx(after[:2], rel=FP64_ORDER)
    assert both[0][1][2] + both[1][1][2] == pytest.approx(after[2], rel=FP64_ORDER)


def test_what_was_forgotten_is_looked_up_in_the_rows_to_the_bit(
    config: RunConfig, vary: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """The last applied batch and the last probe before batch 18, as a process knows that has been there, and as one that has not."""
    config = vary(config, **{"guard.probe_every": 5})
    seen: list[Recent] = []

    class Watching(Recent):
        def __init__(self) -> None:
            super().__init__()
            seen.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "Recent", Watching)
        rehearse(config, tmp_path / "run", Script(nan_batches=(17,), stop_after=17))
    with open_run(config, tmp_path / "run", ALONE, notify=ignore, peak=0.0) as run:
        looked_up = Recent()
        looked_up.look_up(run.keeping, 18)
        assert (looked_up.applied, looked_up.probe) == (seen[0].applied, seen[0].probe)
        assert looked_up.applied is not None
        assert looked_up.applied.batch_index == 16
        (probe,) = looked_up.probes()
        assert {role.role for role in probe.roles} == {"embedding", "hidden", "norm"}
        assert all(role.largest_weight > 1 and role.update_norm > 0 for role in probe.roles)
        looked_up.forget()
        assert looked_up == Recent()
        looked_up.look_up(run.keeping, 16)
        assert looked_up.applied is not None
        assert looked_up.applied.batch_index == 15


def test_after_a_rollback_nothing_of_the_path_that_was_left_is_remembered(config: RunConfig, tmp_path: Path) -> None:
    log: list[int | str] = []

    class Watching(Recent):
        def note(self, outcome: StepOutcome, probe: dict[str, float]) -> None:
            log.append(outcome.signals.batch_index)

        def forget(self) -> None:
            log.append("forgets")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "Recent", Watching)
        rehearse(config, tmp_path / "run", Script(rollback_after=17, rollback_to=16))
    assert log == [*range(17), "forgets", *range(16, 24)]
