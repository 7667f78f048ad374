"""Suspects: who stands out, and why."""

import math
import random

import pytest

from surefoot.guard.evidence import Candidate
from surefoot.guard.suspects import compression, entropy, rank, repetition, stands_out

RNG = random.Random(7)
PROSE = tuple(int(RNG.paretovariate(1.0)) % 5000 for _ in range(400))
NOISE = tuple(RNG.randrange(60_000) for _ in range(400))
DOMAINS = {"web": (3.0, 0.3), "code": (1.5, 0.3)}


def candidate(
    name: str, loss: float, domain: str = "web", row: int = 0, targets: int = 400, tokens: tuple[int, ...] = PROSE
) -> Candidate:
    return Candidate(
        document=name, domain=domain, row=row, loss=loss, num_targets=targets, tokens=tokens, text=f"text of {name}"
    )


def expected(domain: str) -> tuple[float, float]:
    return DOMAINS.get(domain, (math.nan, math.nan))


def names(*candidates: Candidate, keep: int = 4) -> list[str]:
    return [suspect.document for suspect in rank(candidates, expected, keep)]


def test_a_piece_is_measured_against_its_own_domain_either_way() -> None:
    found = rank(
        [candidate("usual", 3.1), candidate("easy", 1.5), candidate("hard", 6.0), candidate("code", 3.0, "code")],
        expected,
    )
    assert [s.document for s in found] == ["hard", "code", "easy", "usual"]
    assert [s.z > 0 for s in found] == [True, True, False, True]
    assert found[0].z == pytest.approx(3.0 / math.sqrt(0.3**2 + 4 / 400))
    assert "loss 6.00 nats where 3.00 is normal for web (+9 sigma)" in found[0].reasons
    assert found[3].reasons == ()


def test_a_short_piece_must_be_further_out() -> None:
    long, short = rank([candidate("short", 5.0, targets=8), candidate("long", 5.0)], expected)
    assert (long.document, short.document) == ("long", "short")
    assert stands_out(long)
    assert not stands_out(short)
    assert short.z == pytest.approx(2.0 / math.sqrt(0.3**2 + 4 / 8))


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_comes_first_and_the_text_tells_one_from_another(loss: float) -> None:
    flood = (77,) * 400
    found = rank(
        [candidate("hard", 90.0), candidate("a", loss, row=1), candidate("b", loss, row=2, tokens=flood)], expected
    )
    assert [s.document for s in found] == ["b", "a", "hard"]
    assert found[0].z == math.inf
    assert found[0].reasons[0] == "its loss is not finite"
    assert all(map(stands_out, found))


def test_odd_text_counts_as_suspicion_even_at_a_usual_loss() -> None:
    found = rank([candidate("high", 3.9), candidate("flood", 3.1, tokens=(5, 6) * 200)], expected)
    assert [s.document for s in found] == ["flood", "high"]
    assert found[0].reasons == ("100 % of its tokens repeat the same few over and over",)


def test_without_a_baseline_the_other_candidates_are_the_measure() -> None:
    others = [candidate(f"n{i}", 2.0 + 0.1 * i, "new", i) for i in range(5)]
    found = rank([*others, candidate("odd", 7.0, "new", 9)], expected)
    assert found[0].document == "odd"
    assert stands_out(found[0])
    assert not any(map(stands_out, found[1:]))
    assert "is normal for" not in found[0].reasons[0]
    assert rank(others[:3], expected)[0].z == 0


def test_a_domain_without_spread_does_not_make_suspects_of_all() -> None:
    found = rank([candidate("a", 2.1, "flat", tokens=PROSE)], lambda _: (2.0, 0.0))
    assert not stands_out(found[0])


def test_only_the_worst_piece_of_a_document_is_kept_and_ties_go_by_row() -> None:
    pieces = [candidate("twice", 4.5, row=1), candidate("twice", 6.0, row=2), candidate("b", 4.0, row=5)]
    found = rank([*pieces, candidate("a", 4.0, row=4), candidate("z", 4.0, row=3)], expected)
    assert [(s.document, s.row) for s in found] == [("twice", 2), ("z", 3), ("a", 4), ("b", 5)]
    assert names(*pieces, keep=1) == ["twice"]
    assert rank([], expected) == ()


def test_ranking_does_not_depend_on_the_order_of_the_candidates() -> None:
    pieces = [candidate(f"d{i % 30}", 2.0 + 0.05 * (i * 37 % 101), row=i) for i in range(120)]
    first = rank(pieces, expected)
    for seed in range(5):
        shuffled = list(pieces)
        random.Random(seed).shuffle(shuffled)
        assert rank(shuffled, expected) == first


@pytest.mark.parametrize("period", [1, 2, 5, 13])
def test_a_run_of_thirty_two_repetitions_is_marked_to_the_token(period: int) -> None:
    run = tuple(range(1000, 1000 + period)) * 32
    around = tuple(range(2000, 2000 + 1100))
    tokens = around[:500] + run + around[500:]
    assert repetition(tokens) == pytest.approx(len(run) / len(tokens))
    shorter = around[:500] + run[:-1] + around[500:]
    assert repetition(shorter) == 0


def test_in_a_short_piece_half_of_it_must_repeat_and_four_times_at_least() -> None:
    assert repetition((1, 2, 3, 4) * 4 + tuple(range(10, 26))) == 0.5
    assert repetition((1, 2, 3, 4) * 4 + tuple(range(10, 27))) == 0
    assert repetition((1, 2, 3, 4) * 3) == 0
    assert repetition((9,) * 4) == 1
    assert repetition(()) == 0


def test_a_period_beyond_thirteen_is_not_a_flood() -> None:
    assert repetition(tuple(range(14)) * 40) == 0
    assert repetition(PROSE) == 0


def test_entropy_is_in_bits_per_token() -> None:
    assert entropy((1, 2, 3, 4) * 8) == pytest.approx(2.0)
    assert entropy((5,) * 9) == 0
    assert entropy(()) == 0


def test_compression_tells_copies_from_text_and_text_from_noise() -> None:
    copies = tuple(range(100)) * 5
    assert compression(copies) < 0.3 < compression(PROSE) < 0.95 < compression(NOISE)
    assert compression(tuple(t % 256 for t in NOISE)) > 0.95
    assert compression(()) == 1
    assert compression((1 << 20, 5) * 100) < 0.1


def test_reasons_name_each_oddity_of_the_text_once() -> None:
    few = tuple(RNG.choice((3, 8, 11)) for _ in range(200))
    cases = {
        "few": (few, "only 1.6 bits per token"),
        "copied": (tuple(range(40)) * 12, "its tokens compress to"),
        "noise": (NOISE, "its tokens do not compress at all"),
    }
    for name, (tokens, phrase) in cases.items():
        (found,) = rank([candidate(name, 3.0, tokens=tokens)], expected)
        assert len(found.reasons) == 1, name
        assert phrase in found.reasons[0]
    assert rank([candidate("short", 3.0, tokens=(1, 1, 2))], expected)[0].reasons == ()
