"""Attention over tokens that lie on several ranks, against the model's own kernel on whole rows."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from surefoot.model.attention_backends import AttentionBackend, EagerAttention, InSingle, ScaledDotProduct
from surefoot.model.loss import LossSums
from surefoot.parallel import ring, ring_kernel
from surefoot.parallel.context import ExchangedHeads
from surefoot.parallel.context_pieces import Pieces, SharedRows
from surefoot.parallel.fork_launch import run_ranks
from surefoot.parallel.ring import RingAttention, pairs, what_is_seen
from surefoot.parallel.ring_kernel import Pair
from tolerances import BF16_ATTENTION, CONTEXT_BF16, FP32_KERNEL, FP64_KERNEL

ROWS, TOKENS = 3, 48
KERNELS: dict[str, Callable[[Pieces], AttentionBackend]] = {
    "ring": RingAttention,
    "all_to_all": lambda pieces: ExchangedHeads(EagerAttention(), pieces),
    "all_to_all_sdpa": lambda pieces: ExchangedHeads(ScaledDotProduct(), pieces),
}


class Problem(NamedTuple):
    """Whole rows, the gradient of what comes out, and document numbers."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    documents: Tensor | None


def problem(
    *, dtype: torch.dtype = torch.float64, kv_heads: int = 4, heads: int = 8, documents: str = "random", seed: int = 0
) -> Problem:
    """With documents "random", some of which are longer than any chunk, or with blanked tokens, or "none"."""
    draw = torch.Generator().manual_seed(seed)
    shapes = [(ROWS, TOKENS, n, 6) for n in (heads, kv_heads, kv_heads, heads)]
    q, k, v, grad = (torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes)
    if documents == "none":
        return Problem(q, k, v, grad, None)
    ends = torch.rand(ROWS, TOKENS, generator=draw) < 0.08
    numbers = ends.int().cumsum(1).int()
    numbers[0] = torch.arange(TOKENS) // 31  # over the borders of every cut
    if documents == "blanked":
        numbers[0, 5:15] = -1
        numbers[1, -9:] = -1
        numbers[2] = -1
    return Problem(q, k, v, grad, numbers)


def results(kernel: AttentionBackend, case: Problem, pieces: Pieces | None = None) -> list[Tensor]:
    """Output and gradients of q, k and v, of whole rows."""
    cut = pieces.mine if pieces else torch.clone
    inputs = [cut(x).requires_grad_() for x in case[:3]]
    out = kernel(*inputs, kernel.prepare(case.documents, inputs[0].flatten(2)))
    out.backward(cut(case.grad))
    found = [out, *(x.grad for x in inputs)]
    return [kernel.whole(x) if pieces else x.detach() for x in found]  # type: ignore[attr-defined]


def on_ranks(rank: int, world: int, name: str, cases: list[Problem]) -> list[list[Tensor]]:
    pieces = Pieces(dist.group.WORLD.group_name, rank, world, balanced=name == "ring")
    return [results(KERNELS[name](pieces), case, pieces) for case in cases]


def deviation(found: list[Tensor], expected: list[Tensor]) -> float:
    return max(
        float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(found, expected, strict=True)
    )


CASES = [
    problem(documents="random"),
    problem(documents="blanked", seed=1),
    problem(documents="none", seed=2),
    problem(heads=4, seed=3),
]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", KERNELS)
def test_tokens_on_several_ranks_attend_as_on_one(name: str, world: int) -> None:
    """Documents that span chunks, blanked ones, none; grouped heads and single ones."""
    for found in run_ranks(world, on_ranks, name, CASES):
        for case, tensors in zip(CASES, found, strict=True):
            assert deviation(tensors, results(EagerAttention(), case)) <= FP64_KERNEL


def test_three_ranks_and_one_key_head_go_round_as_well() -> None:
    cases = [problem(kv_heads=1, heads=3)]
    for found in run_ranks(3, on_ranks, "ring", cases):
        assert deviation(found[0], results(EagerAttention(), cases[0])) <= FP64_KERNEL


def test_exchanged_heads_change_no_bit() -> None:
    cases = [problem(dtype=dtype, documents="blanked") for dtype in (torch.float32, torch.bfloat16)]
    for found in run_ranks(2, on_ranks, "all_to_all", cases):
        for case, tensors in zip(cases, found, strict=True):
            for tensor, expected in zip(tensors, results(EagerAttention(), case), strict=True):
                assert tensor.equal(expected)


def test_narrow_keys_go_round_within_their_rounding() -> None:
    """No further from fp64 than the kernel on one rank, but for what merging rounds once more."""
    cases = [problem(dtype=dtype, documents="blanked") for dtype in (torch.float32, torch.bfloat16)]
    exact = [results(EagerAttention(), Problem(*(x.double() for x in case[:4]), case.documents)) for case in cases]  # type: ignore[arg-type]
    for found in run_ranks(4, on_ranks, "ring", cases):
        assert [x.dtype for x in found[1]] == [torch.bfloat16] * 4
        assert deviation(found[0], exact[0]) <= FP32_KERNEL
        assert deviation(found[1], exact[1]) <= BF16_ATTENTION
        assert deviation(found[1], exact[1]) <= CONTEXT_BF16 * deviation(results(EagerAttention(), cases[1]), exact[1])


def in_single(rank: int, world: int, case: Problem) -> list[Tensor]:
    pieces = Pieces(dist.group.WORLD.group_name, rank, world, balanced=True)
    return results(RingAttention(pieces, in_single=True), case, pieces)


def test_fp16_is_multiplied_in_fp32_where_the_model_s_kernel_does_so() -> None:
    """Both round what comes out, and nothing else."""
    case = problem(dtype=torch.float16)
    for found in run_ranks(2, in_single, case):
        expected = results(InSingle(EagerAttention()), case)
        assert all(x.dtype == torch.float16 for x in found)
        assert deviation(found, expected) <= 2**-11


def test_queries_in_small_blocks_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SCORES": 1, "LEAST_QUERIES": 5, "QUERY_BLOCK": 3, "MAX_BLOCKS": 100}.items():
        monkeypatch.setattr(ring_kernel, name, value)
    case = problem(documents="blanked")
    found = run_ranks(2, on_ranks, "ring", [case])
    assert deviation(found[0][0], results(EagerAttention(), case)) <= FP64_KERNEL


def blind_to_documents(documents_BT: Tensor | None, pieces: Pieces, step: int, at: tuple[int, int]) -> Pair:
    """Right inside a chunk."""
    pair = what_is_seen(documents_BT, pieces, step, at)
    return pair if pair.same else Pair(None, False)


def forgetful(*_: Tensor) -> None:
    """Keeps what the first keys gave."""


@pytest.mark.parametrize(
    ("of", "name", "wrong"), [(ring, "what_is_seen", blind_to_documents), (ring, "merge", forgetful)]
)
def test_a_mask_or_a_merge_that_forgets_other_chunks_is_noticed(
    of: object, name: str, wrong: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of, name, wrong)
    found = run_ranks(2, on_ranks, "ring", CASES[:1])[0][0]
    assert deviation(found, results(EagerAttention(), CASES[0])) > 1e-2


def counted(rank: int, world: int, case: Problem) -> tuple[int, int, int]:
    """Pairs of chunks in a forward and in a backward, and those of them that lie on the diagonal."""
    seen = []

    def attend(q: Tensor, k: Tensor, v: Tensor, pair: Pair) -> tuple[Tensor, Tensor]:
        seen.append(("forward", pair.same))
        return ring_kernel.attend(q, k, v, pair)

    def add_gradients(q: Tensor, k: Tensor, v: Tensor, pair: Pair, *rest: object) -> None:
        seen.append(("backward", pair.same))
        ring_kernel.add_gradients(q, k, v, pair, *rest)  # type: ignore[arg-type]

    # this rank's process ends with the test
    ring.attend, ring.add_gradients = attend, add_gradients  # type: ignore[assignment]
    on_ranks(rank, world, "ring", [case])
    passes = [kind for kind, _ in seen]
    return passes.count("forward"), passes.count("backward"), sum(same for _, same in seen)


@pytest.mark.parametrize("world", [2, 4])
def test_every_rank_multiplies_as_many_chunks_and_none_that_causality_forbids(world: int) -> None:
    """Of 4 cp^2 pairs, 2 cp (2 cp + 1) / 2 are allowed: 2 cp + 1 for each rank, two of them on the diagonal, forward and backward."""
    assert run_ranks(world, counted, CASES[2]) == [(2 * world + 1, 2 * world + 1, 4)] * world


def test_all_pairs_that_causality_allows_are_met_once() -> None:
    met = []
    for rank in range(4):
        pieces = Pieces("", rank, 4, balanced=True)
        for step in range(4):
            theirs = pieces.chunks((rank - step) % 4)
            met += [(pieces.chunks(rank)[i], theirs[j]) for i, j in pairs(pieces, step)]
    assert sorted(met) == [(query, key) for query in range(8) for key in range(query + 1)]


def checked(rank: int, world: int) -> None:
    """What torch finds wrong with an operator: results that alias, shapes and strides of its stand-in."""
    q, k, v, _, documents = problem(documents="blanked", dtype=torch.float32, kv_heads=1, heads=2)
    group = dist.group.WORLD.group_name
    leaves = [x[:, : TOKENS // 2].clone().requires_grad_() for x in (q, k, v)]
    cases = [
        (torch.ops.surefoot.ring.default, (*leaves, documents, group, rank, world)),
        (torch.ops.surefoot.exchange.default, (q.view(2, -1).clone().requires_grad_(), group)),
    ]
    for operator, arguments in cases:
        torch.library.opcheck(
            operator, arguments, test_utils=("test_schema", "test_autograd_registration", "test_faketensor")
        )


@pytest.mark.filterwarnings("ignore")
def test_a_compiler_may_take_them_for_the_operators_they_claim_to_be() -> None:
    """Compiled blocks keep them whole in one graph, and trust in the stand-ins' shapes."""
    run_ranks(2, checked)


def sums_of(rank: int, world: int) -> list[LossSums]:
    """Of two micro-batches of different rows; in the first, rank 1 has nothing to predict."""
    rows = SharedRows(Pieces(dist.group.WORLD.group_name, rank, world, balanced=True))
    sums = []
    for batch in range(2):
        losses = rows.pieces.mine(torch.arange(16.0).view(2, 8) + 100 * batch)
        top = -torch.inf if rank == 1 and batch == 0 else torch.nan if rank == 0 and batch == 1 else rank + 1.0
        scalars = [torch.tensor(x, requires_grad=x == 4.0) for x in (4.0, 3.0 + rank, 2.0, 1.0, top)]
        sums.append(LossSums(*scalars, losses))
    return rows.whole(sums)


def test_sums_of_whole_rows_are_the_same_on_all_ranks_and_keep_nan() -> None:
    """A maximum over ranks would lose it (gloo) or not (NCCL); a rank without a target must not decide it."""
    first, second = run_ranks(2, sums_of)
    for one, two in zip(first, second, strict=True):
        assert all(torch.equal(a.nan_to_num(-7), b.nan_to_num(-7)) for a, b in zip(one, two, strict=True))
        assert [float(x) for x in one[:4]] == [8.0, 7.0, 4.0, 2.0]
        assert not one.objective.requires_grad
    assert float(first[0].lse_max) == 1.0
    assert torch.isnan(first[1].lse_max)
    assert first[0].token_losses_BT.equal(torch.arange(16.0).view(2, 8))
    assert first[1].token_losses_BT.equal(torch.arange(16.0).view(2, 8) + 100)


def test_rows_that_cannot_be_cut_are_refused() -> None:
    pieces = Pieces("", 0, 4, balanced=True)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rows of 20 tokens do not divide into 8 chunks for 4 context parallel ranks"):
        pieces.mine(torch.zeros(2, 20))


def test_fewer_key_heads_than_ranks_are_not_exchanged() -> None:
    pieces = Pieces("", 0, 4, balanced=False)  # type: ignore[arg-type]
    q, k = torch.zeros(1, 2, 8, 4), torch.zeros(1, 2, 2, 4)
    with pytest.raises(ValueError, match="8 query and 2 key heads do not divide over 4 context parallel ranks"):
        ExchangedHeads(EagerAttention(), pieces)(q, k, k, None)
