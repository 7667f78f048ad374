"""Who sees whom, in every backend, against attention written out token by token."""

import math

import pytest
import torch
from torch import Tensor

from surefoot.model.attention_backends import (
    MAX_BLOCKS,
    QUERY_BLOCK,
    AttentionBackend,
    EagerAttention,
    FlexAttention,
    ScaledDotProduct,
    choose_backend,
)
from surefoot.model.rope import rotate, rotation
from tolerances import BF16_ATTENTION, FP64_KERNEL

BACKENDS = [EagerAttention(), ScaledDotProduct()]
NAMES = ["eager", "sdpa"]


def written_out(q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
    """One query at a time over the keys it may see."""
    rows, tokens, heads, width = q.shape
    group = heads // k.shape[2]
    out = torch.empty_like(q)
    for b in range(rows):
        for t in range(tokens):
            keys = [s for s in range(t + 1) if documents[b, s] == documents[b, t]]
            for n in range(heads):
                scores = k[b, keys, n // group] @ q[b, t, n] / math.sqrt(width)
                out[b, t, n] = scores.softmax(0) @ v[b, keys, n // group]
    return out


def problem(tokens: int, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Tensor]:
    """Queries, keys and values of 4 heads over 2, and rows of several documents with blanked tokens inside and at the end."""
    draw = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(2, tokens, n, 6, generator=draw, dtype=torch.float64).to(dtype) for n in (4, 2, 2))
    documents = torch.stack([torch.arange(tokens) // 9, torch.arange(tokens) // 31]).int()
    documents[0, 3:7] = -1
    documents[1, -5:] = -1
    return [q, k, v], documents


def attend(backend: AttentionBackend, qkv: list[Tensor], documents: Tensor | None) -> Tensor:
    return backend(*qkv, backend.prepare(documents, qkv[0].flatten(2)))


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("tokens", [1, 40, QUERY_BLOCK + 13])
@pytest.mark.parametrize("backend", BACKENDS, ids=NAMES)
def test_a_token_sees_itself_and_the_earlier_tokens_of_its_document(backend: AttentionBackend, tokens: int) -> None:
    qkv, documents = problem(tokens)
    assert relative(attend(backend, qkv, documents), written_out(*qkv, documents)) <= FP64_KERNEL


@pytest.mark.parametrize("backend", BACKENDS, ids=NAMES)
def test_without_documents_a_row_is_one_document(backend: AttentionBackend) -> None:
    qkv, documents = problem(QUERY_BLOCK + 13)
    one = torch.zeros_like(documents)
    plain = attend(backend, qkv, None)
    assert relative(plain, written_out(*qkv, one)) <= FP64_KERNEL
    assert relative(plain, attend(backend, qkv, one)) <= FP64_KERNEL


@pytest.mark.parametrize("backend", BACKENDS, ids=NAMES)
def test_bf16_stays_within_its_rounding(backend: AttentionBackend) -> None:
    qkv, documents = problem(50, torch.bfloat16)
    exact = written_out(*(x.double() for x in qkv), documents)
    out = attend(backend, qkv, documents)
    assert out.dtype == torch.bfloat16
    assert relative(out, exact) <= BF16_ATTENTION


@pytest.mark.parametrize("backend", BACKENDS, ids=NAMES)
def test_gradients_are_derivatives(backend: AttentionBackend) -> None:
    qkv, _ = problem(5)
    documents = torch.tensor([[0, 0, 0, -1, 1]])
    inputs = [x[:1].requires_grad_() for x in qkv]
    assert torch.autograd.gradcheck(lambda *x: attend(backend, list(x), documents), inputs)


@pytest.mark.parametrize("tokens", [QUERY_BLOCK * 2 + 13, QUERY_BLOCK * MAX_BLOCKS + 50])
def test_gradients_over_several_blocks_of_queries_are_those_of_the_fused_kernel(tokens: int) -> None:
    qkv, documents = problem(tokens)
    documents = torch.where(documents < 0, documents, documents // 9)
    grad = torch.randn(qkv[0].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    both = []
    for backend in BACKENDS:
        inputs = [x.clone().requires_grad_() for x in qkv]
        attend(backend, inputs, documents).backward(grad)
        both.append([x.grad for x in inputs])
    assert all(relative(a, b) <= FP64_KERNEL for a, b in zip(*both, strict=True))


@pytest.mark.parametrize("backend", BACKENDS, ids=NAMES)
def test_rows_of_blanked_tokens_give_finite_numbers_and_gradients(backend: AttentionBackend) -> None:
    qkv, documents = problem(QUERY_BLOCK + 3, torch.float32)
    inputs = [x.requires_grad_() for x in qkv]
    out = attend(backend, inputs, torch.full_like(documents, -1))
    out.sum().backward()
    assert all(torch.isfinite(x).all() for x in (out, *(x.grad for x in inputs)))


@pytest.mark.parametrize("backend", BACKENDS, ids=NAMES)
def test_another_document_changes_no_bit(backend: AttentionBackend) -> None:
    qkv, documents = problem(QUERY_BLOCK + 40)
    seen = documents == documents[0, 20]
    seen[1] = False
    outs = [attend(backend, qkv, documents)]
    for x in qkv:
        x[~seen] = x[~seen] * 3 + 1
    outs.append(attend(backend, qkv, documents))
    assert outs[0][seen].equal(outs[1][seen])
    assert not outs[0][~seen].equal(outs[1][~seen])


def test_a_kernel_without_a_backward_on_the_cpu_is_refused_there() -> None:
    with pytest.raises(
        ValueError, match=r"model\.attention_backend='flex' has no backward on the CPU; take 'auto', 'eager' or 'sdpa'"
    ):
        choose_backend("flex", torch.device("cpu"), torch.float32, documents=True)


def test_auto_takes_the_fastest_kernel_of_the_device() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert isinstance(choose_backend("auto", cpu, torch.bfloat16, documents=True), EagerAttention)
    assert isinstance(choose_backend("auto", gpu, torch.bfloat16, documents=False), ScaledDotProduct)
    assert isinstance(choose_backend("auto", gpu, torch.bfloat16, documents=True), FlexAttention)
    assert isinstance(choose_backend("auto", gpu, torch.float64, documents=True), EagerAttention)
    assert isinstance(choose_backend("sdpa", cpu, torch.bfloat16, documents=True), ScaledDotProduct)


def test_the_rule_handed_to_flex_is_the_same_rule() -> None:
    _, documents = problem(70)
    mask = FlexAttention().prepare(documents, torch.empty(2, 70, 8))
    rows, queries, keys = (x.flatten() for x in torch.meshgrid(*map(torch.arange, (2, 70, 70)), indexing="ij"))
    rule = mask.mask_mod(rows, torch.zeros_like(rows), queries, keys).view(2, 1, 70, 70)
    eager = EagerAttention().prepare(documents, torch.empty(2, 70, 8))
    assert rule.equal(eager == 0)


def test_angles_grow_with_position_and_scores_depend_on_distance_alone() -> None:
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 1, 8, generator=draw, dtype=torch.float64) for _ in range(2))

    def score(i: int, j: int) -> float:
        turn = [rotate(x, rotation(torch.tensor([[at]]), 8, 100.0, torch.float64)) for x, at in ((q, i), (k, j))]
        return float((turn[0] * turn[1]).sum())

    assert score(0, 0) == pytest.approx(float((q * k).sum()), rel=1e-14)
    assert score(900, 893) == pytest.approx(score(7, 0), rel=1e-12)
    assert abs(score(7, 0) - score(8, 0)) > 1e-3
    by = rotation(torch.tensor([[3]]), 8, 100.0, torch.float64)
    expected = [math.cos(3 * 100.0 ** (-i / 4)) for i in range(4)]
    assert by.cos.flatten().tolist() == pytest.approx(expected, rel=1e-15)


def test_angles_stay_in_fp32_under_bf16() -> None:
    by = rotation(torch.tensor([[4001]]), 64, 10000.0)
    exact = rotation(torch.tensor([[4001]]), 64, 10000.0, torch.float64)
    assert by.cos.dtype == torch.float32
    # 4001 times an fp32 frequency: half a unit in the last place of 4001 is 1.2e-4
    assert (by.sin - exact.sin).abs().max() < 4e-4
