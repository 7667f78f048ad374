"""The harness of parity by itself: how pieces become wholes, how far is far, and what a row says. What it catches is in the file beside."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from surefoot.cli import main
from surefoot.config.optim import Adam, AdamW, Lion, Muon, StableAdamW
from surefoot.config.validate import validate
from surefoot.proof.parity import Parity, joined, left_out
from surefoot.proof.parity_bounds import BOUNDS
from surefoot.proof.parity_by_hand import stretches
from surefoot.proof.parity_compare import Deviation, compare_tensors, distance, relative, worst_of
from surefoot.proof.parity_course import numbers, words
from surefoot.proof.parity_layouts import CELLS, VARIANTS, Cell, Leg, laid_out, with_precision, with_variant
from surefoot.proof.parity_page import markdown_page, sentence
from surefoot.proof.parity_results import chosen, file_name, passed, read_rows
from surefoot.proof.parity_trace import BatchTrace, Incoherent, Piece, Trace, assemble
from surefoot.proof.parity_update import first_update
from surefoot.recipes.shrink import shrink
from surefoot.recipes.tiny import tiny

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "proof" / "parity"


BATCH = BatchTrace(
    batch_index=0, step=1, state_digest="", figures={}, words={}, rows=(), token_losses_BT=torch.zeros(0, 0)
)


def piece(content: list[float], start: int, whole: int) -> Piece:
    return Piece((whole,), (slice(start, start + len(content)),), torch.tensor(content))


# Pieces


def test_pieces_of_ranks_make_up_the_whole_whoever_holds_them() -> None:
    ranks = [{"w": piece([1.0, 2.0], 0, 4)}, {"w": piece([3.0], 2, 4)}, {"w": piece([3.0, 4.0], 2, 4)}, {}]
    assert assemble(ranks, "state")["w"].tolist() == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize(
    ("second", "text"),
    [
        (piece([3.0], 2, 4), "w: no rank holds 1 of its 4 elements (state)"),
        (piece([5.0, 3.0, 4.0], 1, 4), "w: replicas of the state differ, on ranks 0 and 1"),
        (piece([-0.0, 3.0, 4.0], 1, 4), "w: replicas of the state differ, on ranks 0 and 1"),
        (piece([2.0], 0, 3), "w: rank 1 has another shape or dtype of its state"),
        (None, "w: rank 1 has no state"),
    ],
)
def test_what_is_held_by_nobody_or_differs_in_a_bit_is_named(second: Piece | None, text: str) -> None:
    with pytest.raises(Incoherent) as error:
        assemble([{"w": piece([1.0, 0.0], 0, 4)}, {"w": second}], "state")
    assert str(error.value) == text


# Distances


def test_distances_are_relative_and_what_is_zero_in_one_alone_is_infinitely_far() -> None:
    zero, one = torch.zeros(4), torch.ones(4)
    assert distance(zero, zero) == 0
    assert distance(one, zero) == distance(zero, one) == math.inf
    assert distance(one * 1.5, one) == pytest.approx(0.5)
    assert distance(one[:3], one) == distance(one.double(), one) == math.inf
    assert distance(one * math.nan, one) == math.inf


def test_a_number_missing_in_both_is_equal_and_in_one_alone_is_not() -> None:
    assert relative(math.nan, math.nan) == relative(0.0, 0.0) == relative(-math.inf, -math.inf) == 0
    assert relative(math.nan, 1.0) == relative(1.0, 0.0) == relative(0.0, 1.0) == math.inf
    assert relative(1.5, 1.0) == 0.5
    assert relative(1e-3, 0.0, floor=1.0) == 1e-3


def test_a_tensor_that_is_rounding_alone_is_measured_by_the_tensors_around_it() -> None:
    large, noise = torch.ones(100, dtype=torch.float64), torch.full((100,), 1e-15, dtype=torch.float64)
    found = list(compare_tensors({"a": large, "b": -noise}, {"a": large, "b": noise}, "gradient", "now"))
    assert [d.what for d in found] == ["a (now)", "b (now)"]
    assert found[1].value < 1e-11
    lost = list(compare_tensors({"a": large}, {"a": large, "b": noise}, "gradient", "now"))
    assert lost[1].value == math.inf


def test_the_worst_is_the_nearest_to_its_bound_and_what_must_be_equal_has_none() -> None:
    bounds = BOUNDS["fp32"]
    near = Deviation("weight", bounds.weight / 2, "weight")
    far = Deviation("gradient", bounds.gradient / 3, "gradient")
    assert worst_of([far, near], bounds) is near
    other = Deviation("samples", math.inf, "sample")
    assert worst_of([far, other, near], bounds) is other


def test_tables_inside_tables_are_flattened_by_the_names_of_their_members() -> None:
    table = {"a": ({"name": "x", "n": 1}, {"name": "y", "n": None}), "pairs": (("role", 2.0),), "t": "text", "b": True}
    found = numbers(table, "s")
    assert math.isnan(found.pop("s/a/y/n"))
    assert found == {"s/a/x/n": 1.0, "s/pairs/role": 2.0, "s/b": 1.0}
    assert words(table, "s") == {"s/a/x/name": "x", "s/a/y/name": "y", "s/t": "text"}


# Rows


def test_rows_have_names_of_their_own_and_there_are_enough_of_them() -> None:
    titles = [cell.title for cell in CELLS]
    assert len(titles) == len(set(titles)) == len({file_name(title) for title in titles})
    layouts = {(leg.ranks, str(sorted(leg.settings.items(), key=str))) for cell in CELLS for leg in cell.legs}
    assert len(layouts) >= 25
    assert sum(leg.ranks == 8 for cell in CELLS for leg in cell.legs) >= 6
    assert {cell.variant for cell in CELLS} == set(VARIANTS)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.title)
@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_every_row_of_the_tiny_recipe_is_legal(cell: Cell, precision: str) -> None:
    config = with_precision(with_variant(shrink(tiny()), cell.variant), precision)
    for leg in cell.legs:
        assert validate(laid_out(config, leg), leg.ranks) == []


def test_what_the_recipes_own_rules_forbid_is_left_out_with_its_reason() -> None:
    config = with_precision(shrink(tiny()), "fp64")
    odd = dataclasses.replace(config, data=dataclasses.replace(config.data, batch_size=3))
    reason = left_out(odd, Cell(name="ddp 2", legs=(Leg(2),)))
    assert "data.batch_size=3" in reason
    assert left_out(config, Cell(name="ddp 2", legs=(Leg(2),))) == ""


def test_a_variant_that_the_recipe_has_already_is_left_out(small: Parity) -> None:
    before = small.config
    small.config = with_variant(before, "z-loss")
    verdict = small.judge(Cell(name="tp 2", legs=(Leg(2, {"tp": 2}),), variant="z-loss"), "fp64")
    small.config = before
    assert verdict.left_out == "z-loss changes nothing in this recipe"


def test_patterns_choose_rows_by_part_of_their_name_or_by_a_star() -> None:
    assert {cell.title for cell in chosen("zero1", quick=False)} > {"zero1 2", "zero1 2, offload"}
    assert all(cell.title.startswith("tp 2") for cell in chosen("tp 2*recompute full", quick=False))
    assert all(cell.quick for cell in chosen("", quick=True))
    assert chosen("nothing of the kind", quick=False) == ()


def test_a_resumed_run_is_one_run_whose_repeated_batches_count_once() -> None:
    def trace(batches: range, states: dict[int, float]) -> Trace:
        made = [dataclasses.replace(BATCH, batch_index=n) for n in batches]
        return Trace(made, {}, {step: {"w": torch.tensor([x])} for step, x in states.items()}, {})

    whole = joined([trace(range(2), {0: 0.0, 1: 1.0, 2: 2.0}), trace(range(1, 3), {1: 1.0, 3: 3.0})])
    assert [batch.batch_index for batch in whole.batches] == [0, 1, 2]
    assert {step: float(state["w"]) for step, state in whole.states.items()} == {0: 0.0, 1: 1.0, 3: 3.0}


# By hand


@pytest.mark.parametrize("kind", [AdamW(), Adam(weight_decay=0.1), StableAdamW(), Lion(), Muon()])
def test_the_first_update_by_hand_is_what_the_optimiser_does(
    kind: AdamW | Adam | StableAdamW | Lion | Muon, small: Parity
) -> None:
    config = dataclasses.replace(small.config, optim=dataclasses.replace(small.config.optim, optimizer=kind))
    before, small.config = small.config, config
    small._alone.clear()
    try:
        verdict = small.judge(Cell(name="by hand", legs=()), "fp64")
    finally:
        small.config = before
    assert verdict.passed, verdict


def test_the_first_update_by_hand_clips_and_leaves_out_what_it_does_not_know() -> None:
    config = shrink(tiny())
    weights = {"norm.weight": torch.ones(2, dtype=torch.float64)}
    gradient = {"norm.weight": torch.tensor([0.3, -0.4], dtype=torch.float64)}

    def update(norm: float, qk_clip: float = 0.0) -> dict[str, Tensor]:
        optim = dataclasses.replace(config.optim, qk_clip=qk_clip)
        return first_update(weights, gradient, norm, 1e-3, optim, config.model, {"norm.weight": "norm"}, {})

    clipped, whole = update(norm=0.5), update(norm=0.05)
    assert clipped["exp_avg/norm.weight"].tolist() == pytest.approx([0.1 * 0.06, -0.1 * 0.08])
    assert whole["exp_avg/norm.weight"].tolist() == pytest.approx([0.1 * 0.3, -0.1 * 0.4])
    assert "weights/norm.weight" not in update(norm=0.5, qk_clip=1.0)


def test_stretches_are_documents_cut_at_rows_with_the_tokens_that_follow(small: Parity) -> None:
    found = list(stretches(small.config))
    assert sum(len(stretch.tokens) for stretch in found) == small.config.data.batch_size * small.config.data.seq_len
    lengths = [len(stretch.tokens) for stretch in found]
    assert min(lengths) < 16
    assert max(lengths) == small.config.data.seq_len
    for stretch in found:
        assert stretch.targets[:-1] == stretch.tokens[1:]
        assert (stretch.targets[-1] == -1) == (stretch.tokens[-1] == 256)


def test_a_cell_that_breaks_off_is_a_failed_cell_with_its_message(
    small: Parity, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **named: object) -> None:
        raise RuntimeError("the cable is out")

    monkeypatch.setattr("surefoot.proof.parity.run_ranks", broken)
    small._alone.clear()
    verdict = small.judge(Cell(name="ddp 2", legs=(Leg(2),)), "fp64")
    assert not verdict.passed
    assert verdict.error == "RuntimeError: the cable is out"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Parity:
    torch.set_num_threads(1)
    parity = Parity(tiny(), tmp_path_factory.mktemp("small"))
    model = dataclasses.replace(parity.config.model, num_layers=1)
    parity.config = dataclasses.replace(parity.config, model=model)
    return parity


# The command


def test_the_command_says_pass_in_a_table_in_json_and_in_its_code(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["parity", "tiny", "--only", "recompute full*", "--precision", "fp64", "--out", str(tmp_path)]
    assert main.main(words) == 0
    out, err = capsys.readouterr()
    assert "1 runs of 1 layouts in fp64: all pass" in out
    assert "recompute full, fp64: 0.0e+00 nothing" in err
    assert main.main([*words, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""  # what passed is not run again
    facts = json.loads(out)
    assert facts["passed"]
    assert facts["rows"][0]["results"]["fp64"]["compared"] > 1000


def test_a_failed_row_is_told_in_the_code(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surefoot.proof.parity.whole_trace", fail)
    assert main.main(["parity", "tiny", "--only", "ddp 4", "--precision", "fp64"]) == 1
    out, _ = capsys.readouterr()
    assert "1 FAIL" in out


def fail(*args: object) -> None:
    raise Incoherent("w: replicas differ")


def test_wrong_words_are_answered_with_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["parity", "tiny", "--only", "nothing of the kind"]) == 2
    assert "there are: by hand, " in capsys.readouterr().err
    assert main.main(["parity", "tiny", "--precision", "fp63"]) == 2
    assert main.main(["parity", "tiny", "--optim.lrr", "1"]) == 2


# The table in docs


def test_docs_parity_is_the_table_of_the_result_files_and_no_row_is_missing() -> None:
    rows = read_rows(RESULTS)
    assert [row["cell"] for row in rows] == [cell.title for cell in CELLS]
    assert (ROOT / "docs" / "parity.md").read_text() == markdown_page(RESULTS)
    assert "Not run" not in markdown_page(RESULTS)
    for row in rows:
        assert {"command", "commit", "seed", "fingerprint"} <= row.keys()
        assert all(passed(result) for result in row["results"].values()), row["cell"]
    assert "all pass" in sentence(rows, ("fp64", "fp32", "bf16"))
