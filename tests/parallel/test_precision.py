"""What a policy says of a model: dtypes of weights, stream and products, which products are in fp8, and two ranks as one."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from surefoot.config.errors import ConfigError
from surefoot.config.parallel import Fp8Config, ParallelConfig
from surefoot.config.run import RunConfig
from surefoot.data.build import prepare
from surefoot.data.loader import Loader
from surefoot.model.norm import RootMeanSquareNorm
from surefoot.model.parts import Linear, plain_product
from surefoot.model.rope import Rotation
from surefoot.parallel.device import published_flops
from surefoot.parallel.fork_launch import run_ranks
from surefoot.parallel.mesh import World, join_world
from surefoot.parallel.precision import POLICIES, Precision, low_products, multiplying_dtype, policy_of, unrounded
from surefoot.train.setup import set_up
from surefoot.train.step import split, train_step
from tolerances import PRECISION_MICRO_BATCHES, PRECISION_RANKS

ALONE = World(rank=0, size=1, device=torch.device("cpu"), mesh=None)
NAMES = [
    f"blocks.{layer}.{part}"
    for layer in range(4)
    for part in ("attention.query", "attention.output", "feed_forward.down")
]


def fp8(config: RunConfig, **settings: Any) -> RunConfig:
    parallel = dataclasses.replace(config.parallel, precision="fp8", fp8=Fp8Config(**settings))
    return dataclasses.replace(config, parallel=parallel)


def at(config: RunConfig, precision: str) -> RunConfig:
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, precision=precision))


@pytest.mark.parametrize("precision", get_args(Precision))
def test_weights_stream_and_products_have_the_dtypes_of_the_policy(
    config: RunConfig, loader: Loader, precision: Precision
) -> None:
    setup, state = set_up(at(config, precision), ALONE)
    policy = POLICIES[precision]
    seen: dict[str, set[torch.dtype]] = {"stream": set(), "product": set(), "norm": set(), "angle": set()}

    def note(kind: str, module: nn.Module, inputs: Any, output: Tensor) -> None:
        seen[kind].add(output.dtype)

    def note_angles(module: nn.Module, inputs: Any) -> None:
        rotation: Rotation = inputs[1].rotation
        seen["angle"] |= {rotation.cos.dtype, rotation.sin.dtype}

    for block in state.model.blocks:  # type: ignore[union-attr]
        block.register_forward_hook(partial(note, "stream"))
        block.register_forward_pre_hook(note_angles)
    for module in state.model.modules():
        if isinstance(module, Linear):
            module.register_forward_hook(partial(note, "product"))
        if isinstance(module, RootMeanSquareNorm):
            module.register_forward_hook(partial(note, "norm"))
    batch = loader.batch(0)
    sums = setup.forward_backward(split(batch, setup), batch.num_targets)[0]
    wide = torch.float64 if precision == "fp64" else torch.float32
    assert seen["stream"] == seen["product"] == seen["norm"] == {policy.compute}
    assert seen["angle"] == {wide}
    assert {value.dtype for value in sums} == {wide}
    for parameter in state.parameters.values():
        assert parameter.dtype == policy.weights
        assert parameter.grad is not None
        assert parameter.grad.dtype == policy.weights
    moments = {t.dtype for name, t in state.optimizer.tensors().items()}
    train_step(state, batch, setup)
    assert moments == {t.dtype for t in state.optimizer.tensors().values()} == {wide}


class Wide(TorchDispatchMode):
    """Dtypes that exponentials, logarithms and reciprocal roots are computed in."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("exp", "exp_", "log", "cos", "sin"):
            self.seen.add(args[0].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("precision", ["bf16", "bf16_pure", "fp16", "fp8"])
def test_the_loss_and_the_angles_are_computed_in_fp32(config: RunConfig, loader: Loader, precision: str) -> None:
    setup, state = set_up(at(config, precision), ALONE)
    batch = loader.batch(0)
    micro = split(batch, setup)[0]
    with Wide() as mode:
        state.model(*micro)
    assert mode.seen == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_norm_squares_in_fp32_whatever_it_is_given(dtype: torch.dtype) -> None:
    """Squares of 600 are beyond fp16."""
    norm = RootMeanSquareNorm(64, 1e-5)
    nn.init.ones_(norm.weight)
    x = (torch.randn(8, 64, generator=torch.Generator().manual_seed(0)) * 600).to(dtype)
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert torch.allclose(norm(x).double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=0)


def test_fp16_multiplies_in_fp32_on_a_cpu_and_keeps_the_output_projection_there(config: RunConfig) -> None:
    assert multiplying_dtype("fp16", torch.device("cpu")) == torch.float32
    assert multiplying_dtype("fp16", torch.device("cuda")) == torch.float16
    _, state = set_up(at(config, "fp16"), ALONE)
    assert state.model.output_dtype == torch.float32
    _, state = set_up(at(config, "fp8"), ALONE)
    assert state.model.output_dtype is None


def test_products_named_high_and_first_and_last_blocks_are_left_alone(config: RunConfig) -> None:
    low = low_products(NAMES, Fp8Config(high=("attention.output", "down"), high_first_blocks=1, high_last_blocks=2))
    assert low == ["blocks.1.attention.query"]
    assert low_products(NAMES, Fp8Config()) == NAMES
    _, state = set_up(fp8(config, high=("attention",)), ALONE)
    plain = {n for n, m in state.model.named_modules() if isinstance(m, Linear) and m.product is plain_product}
    assert plain == {f"blocks.{i}.attention.{part}" for i in (0, 1) for part in ("query", "key", "value", "output")}


def test_a_piece_of_a_name_is_whole_names_between_dots() -> None:
    with pytest.raises(
        ConfigError,
        match=r"parallel.fp8.high has 'out', which is in no product's name; there are: attention.query, attention.output, feed_forward.down",
    ):
        low_products(NAMES, Fp8Config(high=("out",)))


def test_fp8_without_a_product_in_it_is_refused(config: RunConfig) -> None:
    with pytest.raises(ConfigError, match=r"parallel.fp8 keeps all 12 products high .*take parallel.precision=bf16"):
        low_products(NAMES, Fp8Config(high=("attention", "feed_forward")))


def test_a_precision_that_is_not_resolved_is_told() -> None:
    with pytest.raises(
        ValueError, match=r"precision=auto must be resolved: one of fp32, bf16, bf16_pure, fp16, fp8, fp64"
    ):
        policy_of(ParallelConfig())


def test_operands_can_be_left_as_they_are_for_a_while(config: RunConfig) -> None:
    _, state = set_up(fp8(config), ALONE)
    products = [module for module in state.model.modules() if isinstance(module, Linear)]
    before = [module.product for module in products]
    with unrounded(state.model):
        assert all(module.product is plain_product for module in products)
    assert [module.product for module in products] == before
    assert plain_product not in before


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_rounded_operands_change_the_loss_a_little(config: RunConfig, loader: Loader, recipe: str) -> None:
    losses = []
    for settings in (at(config, "bf16"), fp8(config, recipe=recipe)):
        setup, state = set_up(settings, ALONE)
        losses.append(train_step(state, loader.batch(0), setup).signals.loss)
    assert 0 < abs(losses[1] - losses[0]) < 1e-2


def test_peaks_of_a_data_sheet_are_those_of_the_operands() -> None:
    assert published_flops("NVIDIA H100 80GB HBM3", "fp8") == 1979e12
    for precision in ("bf16_pure", "fp16"):
        assert published_flops("NVIDIA H100 80GB HBM3", precision) == 989e12
    assert published_flops("NVIDIA A100-SXM4-80GB", "fp8") is None


LOW = {
    "bf16_pure": {"parallel.precision": "bf16_pure"},
    "fp16": {"parallel.precision": "fp16"},
    "tensorwise": {"parallel.precision": "fp8", "parallel.fp8": Fp8Config(recipe="tensorwise")},
    "rowwise": {"parallel.precision": "fp8"},
    "blockwise": {"parallel.precision": "fp8", "parallel.fp8": Fp8Config(recipe="blockwise")},
}


def three_steps(rank: int, world: int, config: RunConfig) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses and gradient norms of three steps, and the first moments, whole, that the first one's gradients made."""
    here = join_world(config.parallel) if world > 1 else ALONE
    setup, state = set_up(config, here)
    loader = Loader(config.data, prepare(config.data), config.seed)
    outcomes = [train_step(state, loader.batch(0, (), rank, world), setup)]
    moments = {
        name: (m.full_tensor() if isinstance(m, DTensor) else m).detach().float().clone()
        for name, m in state.optimizer.tensors().items()
        if name.startswith("exp_avg/")
    }
    outcomes += [train_step(state, loader.batch(i, (), rank, world), setup) for i in (1, 2)]
    return [o.signals.loss for o in outcomes], [o.signals.gradient_norm for o in outcomes], moments


def furthest(one: Any, other: Any) -> tuple[float, float, float]:
    """Relative distance of losses, norms and, per tensor, moments: the largest of each."""
    losses, norms = (max(abs(b / a - 1) for a, b in zip(one[i], other[i], strict=True)) for i in (0, 1))
    moments = [float(torch.linalg.norm(other[2][name] - m) / torch.linalg.norm(m)) for name, m in one[2].items()]
    return losses, norms, max(moments)


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", LOW)
def test_two_ranks_are_one_within_what_the_precision_rounds(
    config: RunConfig, vary: Callable[..., RunConfig], name: str, layout: str
) -> None:
    config = vary(config, **LOW[name], **{"parallel.data_parallel": layout})
    one = three_steps(0, 1, config)
    first, second = run_ranks(2, three_steps, config)
    assert first[:2] == second[:2]
    distances = furthest(one, first)
    assert all(distance < bound for distance, bound in zip(distances, PRECISION_RANKS[name], strict=True)), distances


def test_bf16_weights_get_gradients_added_up_in_fp32(
    config: RunConfig, vary: Callable[..., RunConfig], loader: Loader
) -> None:
    """Four micro-batches or one: each rounds its own share to bf16, the sum is rounded once more."""
    found = []
    for rows in (0, 1):
        setup, state = set_up(vary(config, **LOW["bf16_pure"], **{"parallel.micro_batch_size": rows}), ALONE)
        batch = loader.batch(0)
        setup.forward_backward(split(batch, setup), batch.num_targets)
        found.append({name: p.grad for name, p in state.parameters.items()})
    for name, grad in found[0].items():
        distance = torch.linalg.norm((found[1][name] - grad).float()) / torch.linalg.norm(grad.float())
        assert distance < PRECISION_MICRO_BATCHES, name
