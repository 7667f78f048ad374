"""Every dense bug of other trainers that is on record (systems.md, table d), planted by a patch of a few lines: parity fails and names what
is wrong."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import surefoot.data.loader as data_loader
import surefoot.model.transformer as transformer
import surefoot.optim.adaptive_clip as adaptive_clip
import surefoot.parallel.apply as apply
import surefoot.parallel.forward_backward as passes
import surefoot.parallel.shard as shard
import surefoot.parallel.tensor_products as tensor_products
import surefoot.train.evaluate as evaluation
import surefoot.train.loop as loop
import surefoot.train.manifest as manifest
import surefoot.train.step as step
import surefoot.train.stock as stock
from surefoot.config.optim import RolesConfig, RoleSettings
from surefoot.data.loader import Loader
from surefoot.data.pack import IGNORE
from surefoot.model.loss import LossSums, next_token_loss
from surefoot.model.rope import Rotation
from surefoot.optim.adam import FusedAdam
from surefoot.optim.newton_schulz import orthogonalise
from surefoot.optim.optimizer import Optimizer
from surefoot.proof.parity import Parity, Verdict
from surefoot.proof.parity_layouts import CELLS, Cell, Leg
from surefoot.recipes.tiny import tiny

Patch = pytest.MonkeyPatch
BY_HAND = Cell(name="by hand", legs=())
ACCUMULATED = Cell(name="4 micro-batches", legs=(Leg(1, {"micro_batch_size": 2}),))
DDP = Cell(name="ddp 2", legs=(Leg(2),))
DDP_ACCUMULATED = Cell(name="ddp 2, 2 micro-batches", legs=(Leg(2, {"micro_batch_size": 2}),))
FSDP = Cell(name="fsdp 2", legs=(Leg(2, {"data_parallel": "fsdp"}),))
PP = Cell(name="pp 2", legs=(Leg(2, {"pp": 2, "micro_batch_size": 2}),))
TP = Cell(name="tp 2", legs=(Leg(2, {"tp": 2}),))
RESUMED = next(cell for cell in CELLS if cell.name == "save and resume")
DAMAGED = next(cell for cell in CELLS if cell.damaged)


@pytest.fixture(scope="module")
def parity(tmp_path_factory: pytest.TempPathFactory) -> Parity:
    """A recipe small enough for a second, every role with a rate of its own; its one-process run is made before anything is planted."""
    torch.set_num_threads(1)
    roles = RolesConfig(embedding=RoleSettings(lr=0.5, decay=0.0), norm=RoleSettings(lr=2.0, decay=0.0))
    parity = Parity(tiny(), tmp_path_factory.mktemp("parity"))
    small = parity.config
    parity.config = dataclasses.replace(
        small,
        model=dataclasses.replace(small.model, num_layers=2),
        data=dataclasses.replace(small.data, batch_size=8),
        optim=dataclasses.replace(small.optim, roles=roles),
    )
    parity.alone("", "fp64")
    return parity


@pytest.fixture
def anew(parity: Parity) -> Iterator[Parity]:
    """The same, but its one-process runs have what is planted too."""
    before = dict(parity._alone)
    parity._alone.clear()
    yield parity
    parity._alone.clear()
    parity._alone.update(before)


def names(verdict: Verdict, text: str) -> bool:
    """Whether the cell failed, and says so of this tensor or metric."""
    assert not verdict.left_out, verdict.left_out
    assert not verdict.error, verdict.error
    assert not verdict.passed
    return any(text in line for line in verdict.beyond)


@pytest.mark.parametrize(
    "cell", [BY_HAND, ACCUMULATED, DDP_ACCUMULATED, FSDP, TP, PP, RESUMED, DAMAGED], ids=lambda cell: cell.name
)
def test_with_nothing_planted_every_cell_passes(cell: Cell, parity: Parity) -> None:
    verdict = parity.judge(cell, "fp64")
    assert verdict.passed, verdict
    assert verdict.compared > 90


# 2: the norm is that of a rank's own part


@pytest.mark.parametrize("cell", [FSDP, PP], ids=lambda cell: cell.name)
def test_a_norm_of_each_shard_or_stage_by_itself_is_caught(cell: Cell, parity: Parity, monkeypatch: Patch) -> None:
    measure = step.measure

    def alone(state: Any, *rest: Any) -> Any:
        measured = measure(state, *rest)
        own = step.torch.stack([p.grad.to_local().square().sum() for p in state.parameters.values()]).sum().sqrt()
        return dataclasses.replace(measured, norm=own)

    monkeypatch.setattr(step, "measure", alone)
    assert names(parity.judge(cell, "fp64"), "signals/gradient_norm of batch 0 differs between ranks")


# 3, 15, 27, 28: micro-batches


def planted_passes(
    before: Callable[[list[Any], int], None] | None = None, after: Callable[[list[Any], int, int], None] | None = None
) -> Callable[..., list[LossSums]]:
    """Passes over micro-batches with something done to the gradients before or after each."""

    def call(self: Any, micro_batches: Any, num_targets: float) -> list[LossSums]:
        sums = []
        parameters = list(self.model.parameters())
        for index, micro in enumerate(micro_batches):
            if before:
                before(parameters, index)
            parts = self.model(*micro)
            torch.autograd.backward(parts.objective / num_targets)
            sums.append(parts)
            if after:
                after(parameters, index, len(micro_batches))
        return sums

    return call


def test_gradients_scaled_at_every_micro_step_are_caught(parity: Parity, monkeypatch: Patch) -> None:
    def scaled(parameters: list[Any], index: int, count: int) -> None:
        for parameter in parameters:
            parameter.grad.mul_(1 - 1 / count)

    monkeypatch.setattr(passes.PlainForwardBackward, "__call__", planted_passes(after=scaled))
    assert names(parity.judge(ACCUMULATED, "fp64"), "embedding.weight (gradient of step 1)")


def test_only_the_last_micro_batch_kept_is_caught(parity: Parity, monkeypatch: Patch) -> None:
    def emptied(parameters: list[Any], index: int) -> None:
        for parameter in parameters:
            parameter.grad = None

    monkeypatch.setattr(passes.PlainForwardBackward, "__call__", planted_passes(before=emptied))
    assert names(parity.judge(ACCUMULATED, "fp64"), "embedding.weight (gradient of step 1)")


def test_a_last_micro_batch_that_misses_the_reduction_is_caught(parity: Parity, monkeypatch: Patch) -> None:
    def call(self: Any, micro_batches: Any, num_targets: float) -> list[LossSums]:
        sums = []
        for index, micro in enumerate(micro_batches):
            if index == len(micro_batches) - 1:
                for parameter in self.model.parameters():
                    dist.all_reduce(parameter.grad)
            with self.forward.no_sync():
                parts = self.forward(*micro)
                torch.autograd.backward(parts.objective / num_targets)
            sums.append(parts)
        return sums

    monkeypatch.setattr(passes.PlainForwardBackward, "__call__", call)
    assert names(parity.judge(DDP_ACCUMULATED, "fp64"), "replicas of the gradient of step 1 differ")


def test_a_mean_over_devices_instead_of_the_world_is_caught(parity: Parity, monkeypatch: Patch) -> None:
    plain = passes.PlainForwardBackward.__call__
    monkeypatch.setattr(
        passes.PlainForwardBackward, "__call__", lambda self, micro, targets: plain(self, micro, 2 * targets)
    )
    assert names(parity.judge(DDP, "fp64"), "embedding.weight (gradient of step 1)")


def test_muon_inside_the_loop_over_micro_batches_is_caught(parity: Parity, monkeypatch: Patch) -> None:
    muon = dataclasses.replace(ACCUMULATED, variant="muon")
    parity.alone("muon", "fp64")
    kept: dict[int, Any] = {}

    def emptied(parameters: list[Any], index: int) -> None:
        kept.update({at: p.grad for at, p in enumerate(parameters) if index})
        for parameter in parameters:
            parameter.grad = None

    def moved(parameters: list[Any], index: int, count: int) -> None:
        for at, parameter in enumerate(parameters):
            if parameter.ndim == 2 and parameter.shape[0] != 260:
                parameter.grad = orthogonalise([parameter.grad], 5, torch.float64)[0] / count
            if index:
                parameter.grad = parameter.grad + kept[at]

    monkeypatch.setattr(passes.PlainForwardBackward, "__call__", planted_passes(emptied, moved))
    assert names(parity.judge(muon, "fp64"), "blocks.0.attention.query.weight (gradient of step 1)")


# 4, 20: what is told is not what is


def test_an_evaluation_divided_by_micro_batches_is_caught(parity: Parity, monkeypatch: Patch) -> None:
    evaluate = evaluation.evaluate

    def divided(setup: Any, *rest: Any) -> Any:
        found, data = evaluate(setup, *rest), setup.config.data
        return dataclasses.replace(
            found, loss=found.loss * (setup.config.parallel.micro_batch_size or data.batch_size) / data.batch_size
        )

    monkeypatch.setattr(evaluation, "evaluate", divided)
    assert names(parity.judge(ACCUMULATED, "fp64"), "eval/code/loss of batch 1")


def test_a_logged_loss_that_holds_the_z_loss_is_caught(anew: Parity, monkeypatch: Patch) -> None:
    def summed(*args: Any, **named: Any) -> LossSums:
        sums = next_token_loss(*args, **named)
        return sums._replace(ce_sum=sums.objective.detach())

    monkeypatch.setattr(transformer, "next_token_loss", summed)
    verdict = anew.judge(dataclasses.replace(BY_HAND, variant="z-loss"), "fp64")
    assert names(verdict, "train/loss of batch 0 (by hand)")
    assert not any("gradient of step 1" in line for line in verdict.beyond)


# 5, 6: data after a resume


def test_data_that_begin_again_after_a_resume_are_caught(parity: Parity, monkeypatch: Patch) -> None:
    ids, first = Loader.sample_ids, []

    def restarted(self: Loader, batch_index: int) -> Any:
        first.append(batch_index)
        return ids(self, max(batch_index - first[0], 0))

    monkeypatch.setattr(loop, "prove_first_batch", lambda *args: None)
    monkeypatch.setattr(Loader, "sample_ids", restarted)
    assert names(parity.judge(RESUMED, "fp64"), "samples of batch 2")


# 7, 8, 9: targets, positions, angles


@pytest.mark.parametrize("column", ["targets", "positions"])
def test_the_run_itself_refuses_a_wrong_first_batch(column: str, anew: Parity, monkeypatch: Patch) -> None:
    plant_rows(monkeypatch, column)
    assert "the first batch is not what it should be" in anew.judge(BY_HAND, "fp64").error


@pytest.mark.parametrize("column", ["targets", "positions"])
def test_a_mask_not_shifted_and_positions_modulo_are_caught_by_hand(
    column: str, anew: Parity, monkeypatch: Patch
) -> None:
    plant_rows(monkeypatch, column)
    monkeypatch.setattr(loop, "prove_first_batch", lambda *args: None)
    assert names(anew.judge(BY_HAND, "fp64"), "train/loss of batch 0 (by hand)")


def plant_rows(monkeypatch: Patch, column: str) -> None:
    """The mask one token late, or positions that come round after 16 tokens."""
    read_rows = data_loader.read_rows

    def planted(*args: Any) -> Any:
        rows = read_rows(*args)
        if column == "positions":
            rows.positions_BT %= 16
        else:
            silent = rows.targets_BT == IGNORE
            rows.targets_BT[silent] = 0
            rows.targets_BT[:, 1:][silent[:, :-1]] = IGNORE
        return rows

    monkeypatch.setattr(data_loader, "read_rows", planted)


def test_rotary_angles_in_bf16_are_caught(anew: Parity, monkeypatch: Patch) -> None:
    rotation = transformer.rotation

    def rounded(positions_BT: Any, d_head: int, theta: float, dtype: torch.dtype) -> Any:
        angles = rotation(positions_BT, d_head, theta, dtype)
        turns = torch.atan2(angles.sin, angles.cos).bfloat16()
        return Rotation(turns.cos().to(dtype), turns.sin().to(dtype))

    monkeypatch.setattr(transformer, "rotation", rounded)
    assert names(anew.judge(BY_HAND, "fp64"), "logits of a document 8192 positions further on")


# 13, 14, 19: what the optimiser keeps


def test_rates_by_role_lost_at_a_resume_are_caught(parity: Parity, monkeypatch: Patch) -> None:
    set_step_count = FusedAdam.set_step_count

    def forgetful(self: FusedAdam, count: int) -> None:
        set_step_count(self, count)
        for group in self.kernel.param_groups:
            group["scale"] = 1.0

    monkeypatch.setattr(FusedAdam, "set_step_count", forgetful)
    verdict = parity.judge(RESUMED, "fp64")
    assert names(verdict, "weights/embedding.weight (after step 3)")
    assert not any("feed_forward.up.weight (after step 3)" in line for line in verdict.beyond)


def test_rates_collapsed_to_those_of_the_first_group_are_caught(anew: Parity, monkeypatch: Patch) -> None:
    applied = FusedAdam.apply

    def collapsed(self: FusedAdam, update: Any) -> None:
        for group in self.kernel.param_groups:
            group["scale"] = self.kernel.param_groups[0]["scale"]
        applied(self, update)

    monkeypatch.setattr(FusedAdam, "apply", collapsed)
    verdict = anew.judge(BY_HAND, "fp64")
    assert names(verdict, "weights/norm.weight (after step 1, by hand)")
    assert not any("weights/embedding" in line or "exp_avg" in line for line in verdict.beyond)


def test_a_step_count_that_stands_still_is_caught(anew: Parity, monkeypatch: Patch) -> None:
    applied = FusedAdam.apply

    def stuck(self: FusedAdam, update: Any) -> None:
        self.set_step_count(0)
        applied(self, update)

    monkeypatch.setattr(FusedAdam, "apply", stuck)
    assert names(anew.judge(BY_HAND, "fp64"), "the optimiser's own count of steps at step 2")


# 16, 17: gradients scaled away, kept, or not used


def test_gradients_divided_by_the_loss_scale_are_caught(anew: Parity, monkeypatch: Patch) -> None:
    plain = passes.PlainForwardBackward.__call__

    def unscaled(self: Any, micro: Any, targets: float) -> Any:
        sums = plain(self, micro, targets)
        for parameter in self.model.parameters():
            parameter.grad /= 65536
        return sums

    monkeypatch.setattr(passes.PlainForwardBackward, "__call__", unscaled)
    assert names(anew.judge(BY_HAND, "fp64"), "embedding.weight (gradient of step 1, by hand)")


def test_gradients_that_are_never_zeroed_are_caught(anew: Parity, monkeypatch: Patch) -> None:
    monkeypatch.setattr(Optimizer, "zero_grad", lambda self: None)
    assert names(anew.judge(RESUMED, "fp64"), "train/gradient_norm of batch 2")


def test_a_step_left_out_silently_is_caught(anew: Parity, monkeypatch: Patch) -> None:
    def left_out(self: FusedAdam, update: Any) -> None:
        for state in self.kernel.state.values():
            state["step"] += 1

    monkeypatch.setattr(FusedAdam, "apply", left_out)
    assert names(anew.judge(BY_HAND, "fp64"), "weights/embedding.weight (after step 1, by hand)")


# 22, 23: across ranks


def test_clipping_before_the_reduction_is_caught(parity: Parity, monkeypatch: Patch) -> None:
    def clipped(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        norm = bucket.buffer().norm()
        bucket.buffer().div_(torch.clamp(norm / 0.1, min=1.0))
        return passes.sum_hook(group, bucket)

    monkeypatch.setattr(apply, "sum_hook", clipped)
    assert names(parity.judge(DDP, "fp64"), "embedding.weight (gradient of step 1)")


def test_a_parameter_left_as_the_allocator_gave_it_is_caught(parity: Parity, monkeypatch: Patch) -> None:
    fill = shard.fill_parameters

    def partly(parameters: Any, draw: Any) -> None:
        fill(parameters, draw)
        with torch.no_grad():
            parameters["norm.weight"].to_local().fill_(7.0)

    monkeypatch.setattr(apply, "fill_parameters", partly)
    assert names(parity.judge(FSDP, "fp64"), "weights/norm.weight (after step 0)")


def test_gains_whose_gradient_is_not_summed_over_tensor_ranks_are_caught(parity: Parity, monkeypatch: Patch) -> None:
    monkeypatch.setattr(tensor_products, "sum_gradient", lambda weight, ranks: weight)
    verdict = parity.judge(TP, "fp64")
    assert names(verdict, "norm.weight: replicas of the gradient of step 1 differ")


def test_a_count_of_one_ranks_targets_is_caught(parity: Parity, monkeypatch: Patch) -> None:
    count = step.count

    def local(batch: Any, world: Any, **named: Any) -> Any:
        return dataclasses.replace(count(batch, world, **named), num_targets=batch.num_targets)

    monkeypatch.setattr(step, "count", local)
    assert names(parity.judge(DDP, "fp64"), "signals/loss of batch 0 differs between ranks")


# 24: a damaged checkpoint


def test_a_damaged_checkpoint_that_is_taken_is_caught(parity: Parity, monkeypatch: Patch) -> None:
    monkeypatch.setattr(stock, "verify", lambda folder, group=None: [])
    monkeypatch.setattr("surefoot.train.checkpoint.verify", lambda folder, group=None: [])
    monkeypatch.setattr(manifest, "check_files", lambda *args: [])
    verdict = parity.judge(DAMAGED, "fp64")
    assert not verdict.passed
    assert "checkpoint" in (verdict.error or verdict.beyond[0])


# 29: clipping by dtype


def test_clipping_that_is_off_in_bf16_is_caught(anew: Parity, monkeypatch: Patch) -> None:
    monkeypatch.setattr(adaptive_clip._Global, "divisor", lambda self, norm, *rest: torch.ones_like(norm))
    assert names(anew.judge(BY_HAND, "bf16"), "exp_avg/embedding.weight (after step 1, by hand)")


def test_files_of_the_test_are_not_left(parity: Parity) -> None:
    assert not list(Path(parity.folder).glob("run-*"))
