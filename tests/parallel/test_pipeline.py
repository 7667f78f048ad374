"""A model in stages trains as the whole one: every schedule, tied and untied, uneven stages, shapes that change, and broken on purpose."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from surefoot.config.data import BatchStage, LengthStage
from surefoot.config.parallel import PipelineConfig
from surefoot.config.run import RunConfig
from surefoot.data.build import prepare
from surefoot.data.loader import Loader
from surefoot.model.loss import IGNORE, LossSums
from surefoot.parallel.fork_launch import run_ranks
from surefoot.parallel.mesh import join_world
from surefoot.parallel.pipeline import PipelineForwardBackward
from surefoot.parallel.pipeline_stages import layers_of_stages, rank_of_stage, stages_of_rank
from surefoot.parallel.pipeline_tied import TiedCopy
from surefoot.train.setup import set_up
from surefoot.train.step import split, train_step
from tolerances import FP64_RANKS, PIPELINE_BF16

Vary = Callable[..., RunConfig]
Figures = dict[str, Tensor]


def trained(
    rank: int, world: int, config: RunConfig, steps: int = 2, spoil: Callable[[], None] | None = None
) -> Figures:
    """What a rank knows: sums of its rows, gradients of every step, weights and moments after the last, metrics."""
    if spoil is not None:
        spoil()
    here = join_world(config.parallel)
    setup, state = set_up(config, here)
    loader = Loader(config.data, prepare(config.data), config.seed)
    batches = [loader.batch(index, (), here.data_rank, here.data_size) for index in range(steps)]
    found: Figures = {}
    for index, batch in enumerate(batches):
        sums = setup.forward_backward.forward_only(split(batch, setup))
        found[f"{index}/token losses/{here.data_rank}"] = torch.cat([s.token_losses_BT for s in sums])
        found |= {f"{index}/{f}/{here.data_rank}": sum(getattr(s, f) for s in sums) for f in LossSums._fields[:4]}
        metrics = train_step(state, batch, setup).metrics
        found |= {f"{index}/metric/{name}": torch.tensor(value) for name, value in metrics.items()}
        for name, parameter in state.parameters.items():
            assert parameter.grad is not None
            found[f"{index}/gradient/{name}"] = whole(parameter.grad)
    return found | {name: whole(x) for name, x in state.tensors().items()}


def whole(x: Tensor) -> Tensor:
    return x.full_tensor().clone() if isinstance(x, DTensor) else x.detach().clone()


def worst(ranks: list[Figures], alone: Figures) -> tuple[float, str]:
    """The largest relative deviation of any rank and its name, over what one process knows; together the ranks know all of it."""
    assert set().union(*ranks) >= alone.keys()
    return max((relative(x, alone[name]), name) for found in ranks for name, x in found.items() if name in alone)


def not_of_rows(figures: Figures) -> Figures:
    """Without what a data-parallel rank knows of its own rows only."""
    return {name: x for name, x in figures.items() if not name.endswith("/0")}


def relative(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    if torch.equal(a, b) or (a.isnan().all() and b.isnan().all()):
        return 0.0
    found = float((a.double() - b.double()).norm() / b.double().norm())
    return found if math.isfinite(found) else math.inf


@pytest.fixture
def exact(config: RunConfig, vary: Vary) -> RunConfig:
    """Five layers, which no number of stages divides; z-loss; one row to a micro-batch."""
    loss = dataclasses.replace(config.model.loss, z_loss=1e-3)
    model = dataclasses.replace(config.model, num_layers=5, loss=loss)
    return vary(config, model=model, **{"parallel.precision": "fp64", "parallel.micro_batch_size": 1})


def staged(config: RunConfig, vary: Vary, schedule: str, pp: int = 2, **more: Any) -> RunConfig:
    settings = {f"parallel.{key}": value for key, value in more.items()}
    return vary(config, **{"parallel.pp": pp, "parallel.pipeline": PipelineConfig(schedule=schedule)}, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv", "dualpipev"])
def test_every_schedule_gives_the_training_of_one_process(
    exact: RunConfig, vary: Vary, schedule: str, tied: bool
) -> None:
    config = vary(exact, **{"model.tie_embeddings": tied})
    found = run_ranks(2, trained, staged(config, vary, schedule))
    assert worst(found, trained(0, 1, config))[0] <= FP64_RANKS


@pytest.mark.parametrize(
    ("schedule", "pp", "ranks", "more"),
    [
        ("1f1b", 4, 4, {}),
        ("1f1b", 2, 4, {"data_parallel": "fsdp", "recompute": "selective"}),
        ("interleaved", 2, 4, {"data_parallel": "ddp"}),
        ("zero_bubble", 2, 4, {"data_parallel": "zero2", "recompute": "full"}),
        ("zbv", 2, 4, {"cp": 2}),
        ("dualpipev", 2, 4, {"tp": 2}),
        ("zbv", 2, 4, {"data_parallel": "zero1", "offload": True}),
    ],
    ids=["pp4", "x fsdp2 selective", "x ddp2", "x zero2 full", "x cp2", "x tp2", "x zero1 2 offload"],
)
def test_stages_and_other_axes_together_give_the_training_of_one_process(
    exact: RunConfig, vary: Vary, schedule: str, pp: int, ranks: int, more: dict[str, Any]
) -> None:
    config = vary(exact, **{"data.batch_size": 8, "model.vocab_size": 260})
    found = run_ranks(ranks, trained, staged(config, vary, schedule, pp, **more))
    alone = trained(0, 1, config)
    assert worst(found, not_of_rows(alone) if "data_parallel" in more else alone)[0] <= FP64_RANKS


@pytest.mark.parametrize(
    "pipeline",
    [
        PipelineConfig(schedule="zbv", layers=(1, 2, 1, 1)),
        PipelineConfig(schedule="1f1b", layers=(4, 1)),
        PipelineConfig(schedule="zero_bubble", stages_per_rank=2, layers=(2, 1, 1, 1)),
    ],
    ids=["zbv", "1f1b", "zero bubble"],
)
def test_stages_of_any_length_give_the_training_of_one_process(
    exact: RunConfig, vary: Vary, pipeline: PipelineConfig
) -> None:
    config = vary(exact, **{"parallel.pp": 2, "parallel.pipeline": pipeline})
    assert worst(run_ranks(2, trained, config), trained(0, 1, exact))[0] <= FP64_RANKS


def broken(rank: int, world: int, config: RunConfig) -> Figures:
    """A weight of the first block is NaN, and the first micro-batch predicts nothing; then the weight is well again, changed in place."""
    here = join_world(config.parallel)
    setup, state = set_up(config, here)
    micros = split(Loader(config.data, prepare(config.data), config.seed).batch(0), setup)
    micros[0] = micros[0]._replace(targets_BT=torch.full_like(micros[0].targets_BT, IGNORE))
    name = "blocks.0.feed_forward.down.weight"
    local = getattr(state.parameters.get(name), "_local_tensor", state.parameters.get(name))
    with torch.no_grad():
        before = None if local is None else local[0, 0].clone()
        if local is not None:
            local[0, 0] = math.nan
        with torch.enable_grad():
            sums = setup.forward_backward(micros, 9.0)
        found = {f"nan/{i}/{f}": getattr(s, f).detach() for i, s in enumerate(sums) for f in s._fields}
        if local is not None and before is not None:
            local[0, 0] = 1.5 * before
    state.optimizer.zero_grad()
    found |= {f"seen/{i}": s.ce_sum for i, s in enumerate(setup.forward_backward.forward_only(micros))}
    found |= {f"well/{i}": s.ce_sum.detach() for i, s in enumerate(setup.forward_backward(micros, 9.0))}
    return found


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_nan_reaches_every_rank_and_what_was_mended_is_seen_by_the_next_pass(
    exact: RunConfig, vary: Vary, schedule: str
) -> None:
    alone = broken(0, 1, exact)
    assert alone["nan/1/ce_sum"].isnan()
    for found in run_ranks(2, broken, staged(exact, vary, schedule)):
        for name, expected in alone.items():
            torch.testing.assert_close(found[name], expected, rtol=FP64_RANKS, atol=FP64_RANKS, equal_nan=True)


def test_batches_of_other_sizes_and_lengths_follow_one_another(exact: RunConfig, vary: Vary) -> None:
    """A schedule keeps buffers of the shapes that it has seen first."""
    stages = (LengthStage(start_batch=1, seq_len=32),)
    ramp = (BatchStage(start_batch=2, batch_size=6),)
    config = vary(exact, **{"data.length_stages": stages, "data.batch_stages": ramp})
    found = run_ranks(2, trained, staged(config, vary, "1f1b"), 3)
    assert worst(found, trained(0, 1, config, 3))[0] <= FP64_RANKS


def test_bf16_stages_differ_from_one_process_no_more_than_its_rounding(exact: RunConfig, vary: Vary) -> None:
    config = vary(exact, **{"parallel.precision": "bf16"})
    found, alone = run_ranks(2, trained, staged(config, vary, "1f1b"), 1), trained(0, 1, config, 1)
    gradients = {name: x for name, x in alone.items() if name.startswith("0/gradient")}
    assert worst([{n: x for n, x in f.items() if n in gradients} for f in found], gradients)[0] <= PIPELINE_BF16


def without_copys_gradient() -> None:
    TiedCopy.reduce = lambda self: setattr(self.copy, "grad", None) if self.copy is not None else None  # type: ignore[method-assign]


def stale_copy() -> None:
    refresh, seen = TiedCopy.refresh, []

    def once(self: TiedCopy) -> None:
        if not seen:
            refresh(self)
        seen.append(1)

    TiedCopy.refresh = once  # type: ignore[method-assign]


def mean_over_micro_batches() -> None:
    loss = PipelineForwardBackward._loss
    PipelineForwardBackward._loss = lambda self, objective, target: loss(self, objective, target) / 4  # type: ignore[method-assign]


def one_document(module: object, given: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    if "documents_BT" in named:
        named = named | {"documents_BT": torch.zeros_like(named["documents_BT"])}
    return given, named


def documents_left_behind() -> None:
    """The second stage believes that every row is one document."""
    stretch = PipelineForwardBackward.__init__

    def init(self: PipelineForwardBackward, stages: Any, *args: Any) -> None:
        stretch(self, stages, *args)
        if stages.first is None:
            stages.modules[0].register_forward_pre_hook(one_document, with_kwargs=True)

    PipelineForwardBackward.__init__ = init  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("spoil", "shown"),
    [
        (without_copys_gradient, "0/gradient/embedding.weight"),
        (stale_copy, "1/gradient/embedding.weight"),
        (mean_over_micro_batches, "0/gradient/blocks.4.feed_forward.down.weight"),
        (documents_left_behind, "0/gradient/blocks.4.attention.query.weight"),
    ],
)
def test_what_goes_wrong_between_stages_shows(
    exact: RunConfig, vary: Vary, spoil: Callable[[], None], shown: str
) -> None:
    found, alone = run_ranks(2, trained, staged(exact, vary, "1f1b"), 2, spoil), trained(0, 1, exact)
    assert max(relative(f[shown], alone[shown]) for f in found if shown in f) > 1e-3


def test_layers_are_shared_out_evenly_unless_the_config_says_how() -> None:
    assert [len(layers) for layers in layers_of_stages(126, 16, ())] == [8] * 14 + [7] * 2
    assert layers_of_stages(5, 2, (1, 4)) == [range(1), range(1, 5)]


@pytest.mark.parametrize(("schedule", "expected"), [("interleaved", (1, 5, 9)), ("zbv", (1, 6))])
def test_stages_lie_in_a_loop_or_in_a_v(
    config: RunConfig, vary: Vary, schedule: str, expected: tuple[int, ...]
) -> None:
    pipeline = PipelineConfig(schedule=schedule, stages_per_rank=3 if schedule == "interleaved" else 0)  # type: ignore[arg-type]
    parallel = vary(config, **{"parallel.pp": 4, "parallel.pipeline": pipeline}).parallel
    assert stages_of_rank(1, parallel) == expected
    assert all(rank_of_stage(stage, parallel) == 1 for stage in expected)
