"""The decoder as a whole: documents apart, precision, compile, meta device, checkpointing, shards."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from surefoot.config.model import GroupedQueryAttention, InitConfig, LossConfig, ModelConfig, SwiGLU
from surefoot.model.loss import IGNORE, LossSums
from surefoot.model.parametrization import initialise
from surefoot.model.transformer import Transformer
from tolerances import BF16_GRADIENT, BF16_LOSS, COMPILED, FP64_ORDER


def config(**changes: object) -> ModelConfig:
    fields: dict[str, object] = {
        "vocab_size": 61,
        "d_model": 32,
        "num_layers": 2,
        "attention": GroupedQueryAttention(num_heads=4, num_kv_heads=2, d_head=8, qk_norm=True),
        "feed_forward": SwiGLU(d_ff=48),
        "init": InitConfig(std=0.2),
        "loss": LossConfig(z_loss=1e-3, chunk_tokens=33),
    }
    return ModelConfig(**(fields | changes))  # type: ignore[arg-type]


def build(cfg: ModelConfig, dtype: torch.dtype = torch.float64) -> Transformer:
    model = Transformer(cfg, dtype)
    initialise(model, cfg, 11)
    return model


def batch(rows: int = 2, length: int = 50) -> dict[str, Tensor]:
    """Rows of documents of 13 tokens, positions restarting, the last 5 tokens blanked, no prediction across a boundary."""
    tokens = torch.randint(0, 61, (rows, length), generator=torch.Generator().manual_seed(4))
    documents = (torch.arange(length) // 13).int().expand(rows, length).clone()
    positions = (torch.arange(length) % 13).expand(rows, length).clone()
    targets = tokens.roll(-1, 1)
    targets[:, 12::13] = IGNORE
    documents[:, -5:], targets[:, -5:] = -1, IGNORE
    return {"tokens_BT": tokens, "positions_BT": positions, "documents_BT": documents, "targets_BT": targets}


def gradients(model: Transformer, sums: LossSums) -> dict[str, Tensor]:
    model.zero_grad()
    sums.objective.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def relative(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())


def test_a_document_in_a_row_is_the_document_alone() -> None:
    model, data = build(config()), batch()
    packed = model(**data)
    packed_grads = gradients(model, packed)
    model.zero_grad()
    alone = torch.zeros_like(packed.token_losses_BT)
    for row in range(2):
        for start in range(0, 45, 13):
            cut = (slice(row, row + 1), slice(start, min(start + 13, 45)))
            one = {name: x[cut] for name, x in data.items() if name != "documents_BT"}
            sums = model(**one, documents_BT=None)
            sums.objective.backward()
            alone[cut] = sums.token_losses_BT
    assert relative(packed.token_losses_BT, alone) <= FP64_ORDER
    for name, parameter in model.named_parameters():
        assert relative(packed_grads[name], parameter.grad) <= FP64_ORDER, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_a_blanked_span_held_changes_no_bit(dtype: torch.dtype) -> None:
    model, data = build(config(), dtype), batch()
    first = model(**data)
    first_grads = gradients(model, first)
    blanked = data["documents_BT"] == -1
    # the positions of blanked tokens are the only thing blanking leaves of them
    data["positions_BT"] = torch.where(blanked, 3, data["positions_BT"])
    second = model(**data)
    assert all(a.equal(b) for a, b in zip(first, second, strict=True))
    assert all(a.equal(b) for a, b in zip(first_grads.values(), gradients(model, second).values(), strict=True))


def test_logits_are_fp32_and_their_loss_is_the_loss() -> None:
    for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        model, data = build(config(tie_embeddings=False), dtype), batch()
        sums = model(**data)
        logits = model(**{name: x for name, x in data.items() if name != "targets_BT"})
        assert logits.dtype == sums.token_losses_BT.dtype == wide
        assert {p.dtype for p in model.parameters()} == {wide}
        ce = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), data["targets_BT"].flatten(), ignore_index=IGNORE, reduction="sum"
        )
        assert relative(sums.ce_sum, ce) <= 1e-6


def test_bf16_stays_within_its_rounding_of_fp64() -> None:
    cfg, data = config(init=InitConfig(std=0.1)), batch(4)
    narrow, wide = build(cfg, torch.bfloat16), build(cfg)
    got, exact = narrow(**data), wide(**data)
    assert relative(got.ce_sum, exact.ce_sum) <= BF16_LOSS
    grads = gradients(wide, exact)
    assert all(relative(g, grads[name]) <= BF16_GRADIENT for name, g in gradients(narrow, got).items())


def compiled_and_plain(backend: str, dtype: torch.dtype) -> None:
    """Losses and gradients of blocks compiled in place, as one graph each, against eager ones."""
    torch.compiler.reset()
    plain, compiled, data = build(config(num_layers=1), dtype), build(config(num_layers=1), dtype), batch()
    for block in compiled.blocks:
        block.compile(fullgraph=True, backend=backend)
    assert list(compiled.state_dict()) == list(plain.state_dict())
    expected, got = plain(**data), compiled(**data)
    assert relative(got.ce_sum, expected.ce_sum) <= COMPILED[dtype]
    grads = gradients(plain, expected)
    for name, gradient in gradients(compiled, got).items():
        assert relative(gradient, grads[name]) <= COMPILED[dtype], name


def test_far_positions_keep_their_distances_under_bf16() -> None:
    """Angles rounded to bf16 would make positions 4000 to 4015 one."""
    model, data = build(config(), torch.bfloat16), batch()
    near = model(**data)
    data["positions_BT"] = data["positions_BT"] + 4000
    far = model(**data)
    assert relative(far.token_losses_BT, near.token_losses_BT) <= BF16_GRADIENT


@pytest.mark.filterwarnings("default::UserWarning", "default::DeprecationWarning")  # dynamo's own, not ours
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_is_one_graph_for_the_compiler(dtype: torch.dtype) -> None:
    compiled_and_plain("aot_eager", dtype)


@pytest.mark.proof
@pytest.mark.filterwarnings("default::UserWarning", "default::DeprecationWarning")  # dynamo's own, not ours
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_compiled_in_place_agree_with_eager_ones(dtype: torch.dtype) -> None:
    compiled_and_plain("inductor", dtype)


def test_a_model_built_on_the_meta_device_is_complete_once_its_parameters_are() -> None:
    cfg, data = config(), batch()
    with torch.device("meta"):
        model = Transformer(cfg, torch.float64)
    assert not list(model.buffers())
    model.to_empty(device="cpu")
    initialise(model, cfg, 11)
    assert model(**data).objective.equal(build(cfg)(**data).objective)


def test_activation_checkpointing_changes_no_bit() -> None:
    model, data = build(config(), torch.float32), batch()
    expected = gradients(model, model(**data))
    for block in model.blocks:
        block.forward = recomputed(block.forward)
    got = gradients(model, model(**data))
    assert all(got[name].equal(expected[name]) for name in expected)


def recomputed(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x_BTD, context: checkpoint(forward, x_BTD, context, use_reentrant=False)
