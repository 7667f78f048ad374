"""Document losses: fixed-size sums against loops, and the exact tail of a batch spread over ranks."""

import math
import random

import pytest
import torch

from surefoot.train.documents import (
    MIN_TARGETS,
    Pieces,
    domain_stats,
    domain_sums,
    largest,
    piece_losses,
    tail,
    tail_length,
)


def random_rows(rows: int, tokens: int, seed: int, spread: int = 40) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(losses fp32, predicted, document numbers) with documents of all lengths, blanked stretches and ignored targets."""
    draw = random.Random(seed)
    documents = torch.full((rows, tokens), -1, dtype=torch.int32)
    for row in range(rows):
        at = number = 0
        while at < tokens:
            length = draw.randrange(1, spread)
            documents[row, at : at + length] = number if draw.random() < 0.9 else -1
            at, number = at + length, number + 1
    losses = torch.rand(rows, tokens, generator=torch.Generator().manual_seed(seed)) * 8
    predicts = (torch.rand(rows, tokens, generator=torch.Generator().manual_seed(seed + 1)) < 0.9) & (documents >= 0)
    return torch.where(predicts, losses, 0.0), predicts, documents


def by_hand(losses: torch.Tensor, predicts: torch.Tensor, documents: torch.Tensor) -> dict[tuple[int, int], float]:
    """Mean loss of every (row, document) with enough targets."""
    found: dict[tuple[int, int], list[float]] = {}
    for row in range(len(losses)):
        for t in range(losses.shape[1]):
            if predicts[row, t]:
                found.setdefault((row, int(documents[row, t])), []).append(float(losses[row, t]))
    return {key: math.fsum(v) / len(v) for key, v in found.items() if len(v) >= MIN_TARGETS}


def test_pieces_are_the_documents_of_a_row_with_enough_targets() -> None:
    losses, predicts, documents = random_rows(6, 300, seed=1)
    expected = by_hand(losses, predicts, documents)
    pieces = piece_losses(losses, predicts, documents)
    found = {(r, n): float(pieces.loss_BS[r, n]) for r, n in pieces.valid_BS.nonzero().tolist()}
    assert found.keys() == expected.keys()
    assert found == pytest.approx(expected, rel=1e-14)
    assert pieces.loss_BS[~pieces.valid_BS].eq(0).all()
    assert pieces.targets_BS.sum() == predicts.sum()


@pytest.mark.parametrize(("targets", "counts"), [(MIN_TARGETS - 1, False), (MIN_TARGETS, True)])
def test_a_piece_counts_from_sixteen_targets(targets: int, counts: bool) -> None:
    predicts = torch.arange(40)[None] < targets
    pieces = piece_losses(torch.full((1, 40), 2.5), predicts, torch.zeros(1, 40, dtype=torch.int32))
    assert bool(pieces.valid_BS.any()) == counts
    assert float(largest(pieces, 1)[0]) == (2.5 if counts else -math.inf)


def test_what_an_ignored_token_holds_does_not_matter() -> None:
    losses, predicts, documents = random_rows(2, 100, seed=2)
    pieces = piece_losses(losses, predicts, documents)
    spoilt = piece_losses(torch.where(predicts, losses, math.nan), predicts, documents)
    assert torch.equal(pieces.loss_BS, spoilt.loss_BS)


def test_domains_get_the_sums_of_their_own_rows_and_ranks_add_up() -> None:
    losses, predicts, documents = random_rows(8, 200, seed=3)
    domains = torch.tensor([0, 2, 0, 2, 2, 0, 0, 2])
    expected = by_hand(losses, predicts, documents)
    parts = [
        domain_sums(piece_losses(losses[some], predicts[some], documents[some]), domains[some], 3)
        for some in (slice(0, 4), slice(4, 8))
    ]
    stats = domain_stats(["a", "none", "b"], (parts[0] + parts[1]).flatten().tolist())
    assert [s.name for s in stats] == ["a", "b"]
    for stat, domain in zip(stats, (0, 2), strict=True):
        values = [v for (row, _), v in expected.items() if domains[row] == domain]
        assert stat.num_documents == len(values)
        assert stat.mean == pytest.approx(math.fsum(values) / len(values), rel=1e-13)
        assert stat.mean_square == pytest.approx(math.fsum(v * v for v in values) / len(values), rel=1e-13)


def test_a_nan_stays_in_its_own_domain_and_is_the_largest_of_all() -> None:
    losses, predicts, documents = torch.ones(2, 50), torch.ones(2, 50, dtype=torch.bool), torch.zeros(2, 50).int()
    losses[1, 7] = math.nan
    pieces = piece_losses(losses, predicts, documents)
    calm, broken = domain_stats(["calm", "broken"], domain_sums(pieces, torch.tensor([0, 1]), 2).flatten().tolist())
    assert (calm.mean, math.isnan(broken.mean)) == (1.0, True)
    assert math.isnan(largest(pieces, 2)[0])
    top, percentile = tail(torch.stack([largest(pieces, 2), torch.tensor([3.0, 1.0])]), torch.tensor(4.0))
    assert math.isnan(top)
    assert math.isnan(percentile)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("pieces", [1, 900, 999, 1000, 1999, 2000, 3500])
def test_the_percentile_is_exact_from_the_few_largest_of_every_rank(pieces: int, ranks: int) -> None:
    """Nearest rank: the smallest loss that at least 99.9 % of the pieces do not exceed."""
    width, rows = 4, 1000
    generator = torch.Generator().manual_seed(pieces)
    valid = torch.zeros(rows * width, dtype=torch.bool)
    valid[torch.randperm(rows * width, generator=generator)[:pieces]] = True
    losses = torch.where(valid, torch.rand(rows * width, generator=generator, dtype=torch.float64), 0.0)
    whole = Pieces(losses.view(rows, width), valid.view(rows, width), valid.view(rows, width).double() * 16)
    count = tail_length(rows * width * MIN_TARGETS)
    tops = torch.stack(
        [
            largest(Pieces(*(part[r * rows // ranks : (r + 1) * rows // ranks] for part in whole)), count)
            for r in range(ranks)
        ]
    )
    top, percentile = tail(tops, torch.tensor(float(pieces)))
    ordered = sorted(losses[valid].tolist())
    assert float(top) == ordered[-1]
    assert float(percentile) == ordered[math.ceil(0.999 * pieces - 1e-9) - 1]


def test_every_rank_tells_enough_even_if_it_has_all_the_largest() -> None:
    for tokens in (16_000 * n for n in (1, 2, 7)):
        most = tokens // MIN_TARGETS
        assert tail_length(tokens) >= most // 1000 + 1


def test_without_pieces_there_is_no_largest() -> None:
    pieces = piece_losses(torch.ones(2, 8), torch.ones(2, 8, dtype=torch.bool), torch.zeros(2, 8).int())
    top, percentile = tail(largest(pieces, 3)[None], torch.tensor(0.0))
    assert (float(top), float(percentile)) == (-math.inf, -math.inf)
    assert domain_stats(["x"], domain_sums(pieces, torch.tensor([0, 0]), 1).flatten().tolist()) == ()


@pytest.mark.filterwarnings("ignore")
def test_no_shape_depends_on_the_data() -> None:
    """make_fx records the operations for one batch; replayed for another they must give that one's numbers."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def everything(losses, predicts, documents):  # type: ignore[no-untyped-def]
        pieces = piece_losses(losses, predicts, documents)
        return tail(largest(pieces, 3)[None], domain_sums(pieces, torch.zeros(4), 1)[0, 0])

    recorded = make_fx(everything)(*random_rows(4, 120, seed=4))
    for seed in (5, 6):
        other = random_rows(4, 120, seed=seed, spread=70)
        assert recorded(*other) == everything(*other)
