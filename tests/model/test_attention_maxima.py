"""The largest attention logits: exact where they may matter, never missed, and of nothing that attention does not see."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from surefoot.config.model import GroupedQueryAttention, ModelConfig, SwiGLU
from surefoot.model import attention_maxima
from surefoot.model.attention_maxima import AttentionMaxima, largest_logits, logit_bounds
from surefoot.model.parametrization import initialise
from surefoot.model.transformer import Transformer
from tolerances import FP64_KERNEL

ROWS, TOKENS, HEADS, KV_HEADS, WIDTH = 3, 40, 4, 2, 8


def drawn(seed: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(ROWS, TOKENS, HEADS, WIDTH, generator=generator, dtype=torch.float64)
    k = torch.randn(ROWS, TOKENS, KV_HEADS, WIDTH, generator=generator, dtype=torch.float64)
    return q.to(dtype), k.to(dtype)


def documents(seed: int) -> Tensor:
    """Random cuts, with a blanked stretch in every row."""
    generator = torch.Generator().manual_seed(seed)
    numbers = (torch.rand(ROWS, TOKENS, generator=generator) < 0.1).int().cumsum(1)
    numbers[:, 10:15] = -1
    return numbers


def by_full_matrix(q: Tensor, k: Tensor, documents_BT: Tensor | None) -> Tensor:
    """Every logit of every pair in plain loops over heads, then what is not seen left out."""
    tops = []
    for head in range(q.shape[2]):
        scores = torch.einsum("bth,bsh->bts", q[:, :, head], k[:, :, head * k.shape[2] // q.shape[2]]) / WIDTH**0.5
        seen = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril().expand(ROWS, -1, -1)
        if documents_BT is not None:
            same = documents_BT[:, :, None] == documents_BT[:, None, :]
            seen = seen & same & (documents_BT[:, :, None] >= 0)
        tops.append(scores[seen].max())
    return torch.stack(tops)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("logits", [1, 1 << 22], ids=["streamed", "at once"])
def test_streamed_maxima_are_those_of_the_full_matrix(
    masked: bool, logits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_maxima, "LOGITS", logits)
    for seed in range(10):
        (q, k), docs = drawn(seed), documents(seed) if masked else None
        full = by_full_matrix(q, k, docs)
        torch.testing.assert_close(largest_logits(q, k, docs, range(HEADS)), full, rtol=FP64_KERNEL, atol=0)
        torch.testing.assert_close(largest_logits(q, k, docs, [3, 1]), full[[3, 1]], rtol=FP64_KERNEL, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_bound_is_never_below_the_largest_logit(dtype: torch.dtype) -> None:
    for seed in range(50):
        q, k = drawn(seed, dtype)
        generator = torch.Generator().manual_seed(seed)
        scale = 10.0 ** torch.randint(-3, 3, (), generator=generator)
        q, k = q * scale, k * scale
        # the worst case of a bound by norms: a key that is its query
        k[0, 5] = q[0, 7, :KV_HEADS]
        q[1, 9, 0] = 50 * k[1, 3, 0]
        docs = documents(seed) if seed % 2 else None
        assert bool((logit_bounds(q, k) >= largest_logits(q, k, docs, range(HEADS))).all())


def test_a_huge_logit_between_documents_to_a_later_token_or_in_blanked_text_does_not_count() -> None:
    q, k = drawn(0)
    docs = torch.zeros(ROWS, TOKENS, dtype=torch.int32)
    docs[:, 20:] = 1
    docs[:, 30:33] = -1
    plain = largest_logits(q, k, docs, range(HEADS))
    for query, key in ((25, 4), (8, 12), (32, 31), (31, 31)):
        spiked_q, spiked_k = q.clone(), k.clone()
        spiked_q[:, query] *= 1e4
        spiked_k[:, key] *= 1e4
        huge = torch.einsum("bth,bsh->bts", spiked_q[:, :, 0], spiked_k[:, :, 0])
        assert float(huge[:, query, key].abs().max()) > 1e6
        seen = largest_logits(spiked_q, spiked_k, docs, range(HEADS))
        full = by_full_matrix(spiked_q, spiked_k, docs)
        torch.testing.assert_close(seen, full, rtol=FP64_KERNEL, atol=0)
        assert float(seen.max()) < 1e6
    assert float(plain.max()) < 1e2


def test_all_blanked_is_no_logit_and_nan_stays_nan() -> None:
    q, k = drawn(0)
    assert largest_logits(q, k, torch.full((ROWS, TOKENS), -1), [0, 1]).tolist() == [-float("inf")] * 2
    q[0, 0, 1] = float("nan")
    found = largest_logits(q, k, None, [0, 1])
    assert bool(torch.isnan(found[1]))
    assert not bool(torch.isnan(found[0]))


def small(dtype: torch.dtype = torch.float64, **settings: object) -> Transformer:
    cfg = ModelConfig(
        vocab_size=32,
        d_model=16,
        num_layers=2,
        attention=GroupedQueryAttention(num_heads=4, num_kv_heads=2, d_head=4),
        feed_forward=SwiGLU(d_ff=16),
        **settings,  # type: ignore[arg-type]
    )
    model = Transformer(cfg, dtype)
    initialise(model, cfg, 1)
    for block in model.blocks:
        with torch.no_grad():  # logits of an order of one
            block.get_submodule("attention.query").get_parameter("weight").mul_(40)
            block.get_submodule("attention.key").get_parameter("weight").mul_(40)
    return model


def batch(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(32, (2, 24), generator=generator)
    docs = (torch.arange(24) >= 10).int().expand(2, 24).contiguous()
    positions = torch.cat([torch.arange(10), torch.arange(14)]).expand(2, 24).contiguous()
    return tokens, positions, docs


def kernel_inputs(model: Transformer, rows: tuple[Tensor, Tensor, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Queries and keys that the kernel was given in a forward, by layer."""
    found: list[tuple[Tensor, Tensor]] = []

    def watching(context_attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def attend(q: Tensor, k: Tensor, v: Tensor, mask: object) -> Tensor:
            found.append((q.detach(), k.detach()))
            return context_attend(q, k, v, mask)

        return attend

    hooks = [
        block.register_forward_pre_hook(
            lambda _, inputs: (
                inputs[0],
                type(inputs[1])(
                    inputs[1].positions_BT,
                    inputs[1].documents_BT,
                    inputs[1].mask,
                    watching(inputs[1].attend),
                    inputs[1].rotation,
                    inputs[1].maxima,
                ),
            )
        )
        for block in model.blocks
    ]
    with torch.no_grad():
        model(*rows)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_a_forward_tells_the_largest_logit_its_kernel_saw_of_every_head_above_the_threshold(backend: str) -> None:
    model = small(attention_backend=backend)
    rows = batch()
    exact = torch.stack([largest_logits(q, k, rows[2], range(4)) for q, k in kernel_inputs(model, rows)])
    bounds = torch.stack([logit_bounds(q, k) for q, k in kernel_inputs(model, rows)])
    threshold = float(bounds.flatten().sort().values[3:5].mean())
    model.maxima = maxima = AttentionMaxima(threshold, 2, 4)
    with maxima.watch():
        model(*rows)
    above = bounds > threshold
    assert 0 < int(above.sum()) < 8
    assert torch.equal(torch.isfinite(maxima.largest_LN), above)
    torch.testing.assert_close(maxima.largest_LN[above], exact[above], rtol=FP64_KERNEL, atol=0)


def test_maxima_are_over_all_forwards_that_are_watched_and_no_others() -> None:
    model = small()
    model.maxima = maxima = AttentionMaxima(0.0, 2, 4)
    apart = []
    for seed in (0, 1, 2):
        with maxima.watch():
            model(*batch(seed))
        apart.append(maxima.largest_LN)
    model(*batch(2))
    with maxima.watch():
        model(*batch(0))
        model(*batch(1))
    assert torch.equal(maxima.largest_LN, torch.maximum(apart[0], apart[1]))
    assert not torch.equal(apart[0], maxima.largest_LN)


def test_a_layer_computed_again_by_the_backward_is_neither_counted_nor_kept() -> None:
    """As activation checkpointing does: the attention runs again after the forward is over."""
    model = small()
    model.maxima = maxima = AttentionMaxima(0.0, 2, 4)
    with maxima.watch():
        model(*batch(0))
        first = maxima.largest_LN.clone()
        maxima.see(*(1e3 * x for x in drawn(3)))
        assert not maxima._seen, "kept past the forward"
        assert torch.equal(maxima.largest_LN, first)
        model(*batch(0))
        assert torch.equal(maxima.largest_LN, first)


def test_watching_changes_no_bit_of_loss_or_gradients() -> None:
    model, rows = small(), batch()
    results = []
    for threshold in (None, 0.0):
        model.maxima = None if threshold is None else AttentionMaxima(threshold, 2, 4)
        model.zero_grad()
        with AttentionMaxima(0.0, 2, 4).watch() if model.maxima is None else model.maxima.watch():
            sums = model(*rows, rows[0])
        sums.objective.backward()
        results.append([sums.objective.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
