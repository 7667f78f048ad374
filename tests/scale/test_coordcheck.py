"""The coordinate check: what it measures, its slopes and intervals, its verdict, its page and its command."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sample_config import tiny
from surefoot.cli import main
from surefoot.config.errors import ConfigError
from surefoot.config.model import CompleteP, Custom, GroupedQueryAttention, MuP, Standard, SwiGLU
from surefoot.config.run import RunConfig
from surefoot.parallel.digest import digest_tensors
from surefoot.parallel.mesh import World
from surefoot.scale.coord_data import QUANTITIES, activations, coordinates, synthetic_batch
from surefoot.scale.coord_page import coordinate_page, sentence
from surefoot.scale.coordcheck import CoordinateCheck, Plan, Reading, _slopes, check_coordinates, choose_kind
from surefoot.scale.line_fit import Slope, fit_slope, student_t
from surefoot.train.setup import set_up
from surefoot.train.step import on_device, train_step

ALONE = World(rank=0, size=1, device=torch.device("cpu"), mesh=None)


def small(parametrization: Any = None, **changes: Any) -> RunConfig:
    """32 wide, two blocks, four query heads to two."""
    config = tiny()
    model = dataclasses.replace(
        config.model,
        vocab_size=61,
        d_model=32,
        num_layers=2,
        attention=GroupedQueryAttention(num_heads=4, num_kv_heads=2, d_head=8, qk_norm=True),
        feed_forward=SwiGLU(d_ff=48),
        parametrization=parametrization or Standard(),
    )
    model = dataclasses.replace(model, **changes)
    data = dataclasses.replace(config.data, batch_size=2, seq_len=12, document_mask=False)
    parallel = dataclasses.replace(config.parallel, precision="fp32", device="cpu", compile="off")
    return dataclasses.replace(config, model=model, data=data, parallel=parallel)


def test_what_is_measured_is_what_the_model_computes() -> None:
    config = small(MuP(base_d_model=16, base_d_head=2))
    setup, state = set_up(config, ALONE)
    batch = on_device(synthetic_batch(config), setup)
    kept = activations(state.model, batch.tokens_BT, batch.positions_BT)
    model: Any = state.model
    with torch.no_grad():
        x = model.embedding(batch.tokens_BT)
        assert torch.equal(kept["embedding"], x)
        context = model._context(x, batch.positions_BT, None)
        for number, block in enumerate(model.blocks):
            normed = block.attention_norm(x)
            attention = block.attention(normed, context)
            assert torch.equal(kept[f"blocks.{number}.attention"], attention)
            assert torch.equal(kept[f"blocks.{number}.attention_logits"], _logits(block.attention, normed, context))
            middle = x + attention
            assert torch.equal(
                kept[f"blocks.{number}.feed_forward"], block.feed_forward(block.feed_forward_norm(middle), context)
            )
            x = block(x, context)
            assert torch.equal(kept[f"blocks.{number}.residual"], x)
        assert torch.equal(kept["logits"], model(batch.tokens_BT, batch.positions_BT, None))
    assert len(kept) == 2 + 4 * 2


def _logits(attention: Any, x_BTD: torch.Tensor, context: Any) -> torch.Tensor:
    """q k^T sqrt(2) / 8, pair by pair of visible tokens."""
    from surefoot.model.rope import rotate

    rows, tokens, _ = x_BTD.shape
    q = rotate(attention.query_norm(attention.query(x_BTD).view(rows, tokens, 4, 8)), context.rotation) * 0.5
    k = rotate(attention.key_norm(attention.key(x_BTD).view(rows, tokens, 2, 8)), context.rotation)
    scores = torch.einsum("btnh,bsnh->bnts", q, k[:, :, [0, 0, 1, 1]]) * 8**-0.5
    return torch.stack([scores[:, :, t, s] for t in range(tokens) for s in range(t + 1)], dim=-1)


def test_a_size_is_that_of_the_activation_and_its_change_that_from_the_untrained_model() -> None:
    config = dataclasses.replace(small(), steps=3)
    found = coordinates(config, ALONE, 3)
    assert [at.step for at in found] == [0, 1, 2, 3]
    assert all(size.change == 0 for size in found[0].sizes.values())
    setup, state = set_up(config, ALONE)
    batch = synthetic_batch(config)
    micro = on_device(batch, setup)
    first = activations(state.model, micro.tokens_BT, micro.positions_BT)
    for index in range(3):
        train_step(state, dataclasses.replace(batch, batch_index=index), setup)
    last = activations(state.model, micro.tokens_BT, micro.positions_BT)
    for name, size in found[3].sizes.items():
        now, before = last[name].double().numpy(), first[name].double().numpy()
        assert size.mean_abs == pytest.approx(np.abs(now).mean(), rel=1e-5)
        assert size.rms == pytest.approx(np.sqrt((now**2).mean()), rel=1e-5)
        assert size.change == pytest.approx(np.abs(now - before).mean(), rel=1e-4)
    both = [found[3].sizes[f"blocks.{n}.attention"].change for n in range(2)]
    mean, stream = found[3].quantity("attention"), found[3].quantity("residual")
    assert mean is not None
    assert mean.change == pytest.approx(sum(both) / 2)
    assert stream == found[3].sizes["blocks.1.residual"]


def test_looking_changes_nothing_of_the_training() -> None:
    config = small()
    digests = []
    for look in (False, True):
        setup, state = set_up(config, ALONE)
        batch = synthetic_batch(config)
        micro = on_device(batch, setup)
        for index in range(2):
            if look:
                activations(state.model, micro.tokens_BT, micro.positions_BT)
            train_step(state, dataclasses.replace(batch, batch_index=index), setup)
        digests.append(digest_tensors(state.tensors(), None))
    assert digests[0] == digests[1]


def test_slopes_and_intervals_are_those_of_ordinary_least_squares() -> None:
    draw = np.random.default_rng(0)
    x = np.repeat([64.0, 128.0, 256.0, 512.0], 5)
    y = 3 * x**0.7 * np.exp(0.1 * draw.standard_normal(20))
    slope = fit_slope(list(zip(x.tolist(), y.tolist(), strict=True)))
    (expected, _), covariance = np.polyfit(np.log(x), np.log(y), 1, cov="unscaled")
    residual = np.log(y) - np.polyval(np.polyfit(np.log(x), np.log(y), 1), np.log(x))
    error = math.sqrt(covariance[0, 0] * (residual**2).sum() / 18)
    assert slope.value == pytest.approx(expected, rel=1e-10)
    assert slope.high - slope.value == pytest.approx(2.10092 * error, rel=1e-4)
    assert slope.low < 0.7 < slope.high


def test_points_of_students_distribution() -> None:
    """Printed tables: 12.706, 4.303, 3.182, 2.571, 2.228, 2.042."""
    table = {1: 12.706, 2: 4.303, 3: 3.182, 5: 2.571, 10: 2.228, 30: 2.042}
    for freedom, printed in table.items():
        assert student_t(freedom) == pytest.approx(printed, rel=0.01 if freedom == 3 else 1e-3)


def test_what_cannot_be_fitted_is_infinite_or_not_a_number_and_null_in_json() -> None:
    assert fit_slope([(1.0, 1.0), (2.0, math.nan), (4.0, 1.0)]).value == math.inf
    assert math.isnan(fit_slope([(1.0, 1.0), (2.0, 0.0), (4.0, 1.0)]).value)
    assert math.isnan(fit_slope([(2.0, 1.0), (2.0, 3.0), (2.0, 1.0)]).value)
    assert Slope(math.inf, math.nan, 2.0).to_dict() == {"value": None, "low": None, "high": 2.0}


def check_of(own: dict[str, float], control: dict[str, float]) -> CoordinateCheck:
    plan = Plan(config=small(), kind="completep")
    axes = dict.fromkeys(name.partition("/")[0] for name in own)
    readings = tuple(
        Reading(axis=axis, size=1, seed=0, control=False, model=small().model, steps=())  # type: ignore[arg-type]
        for axis in axes
    )
    slopes = [{name: Slope(value, value, value) for name, value in found.items()} for found in (own, control)]
    return CoordinateCheck(plan=plan, readings=readings, slopes=slopes[0], control_slopes=slopes[1])


@pytest.mark.parametrize(
    ("own", "control", "verdict"),
    [
        ({"width/a": 0.09, "width/b": -0.09}, {"width/a": 0.0, "width/b": 0.31}, "flat"),
        ({"width/a": 0.09, "width/b": -0.09}, {"width/a": 0.0, "width/b": -0.31}, "flat"),
        ({"width/a": 0.09, "width/b": -0.09}, {"width/a": 0.2, "width/b": 0.29}, "inconclusive"),
        ({"width/a": 0.11, "width/b": 0.0}, {"width/a": 0.5, "width/b": 0.5}, "not_flat"),
        ({"width/a": 0.0, "width/b": -0.11}, {"width/a": 0.0, "width/b": 0.0}, "not_flat"),
        ({"width/a": math.inf, "width/b": 0.0}, {"width/a": 0.5, "width/b": 0.5}, "not_flat"),
        ({"width/a": math.nan, "width/b": 0.0}, {"width/a": 0.5, "width/b": 0.5}, "not_flat"),
        ({"width/a": 0.0, "depth/a": 0.0}, {"width/a": math.inf, "depth/a": 0.2}, "inconclusive"),
        ({"width/a": 0.0, "depth/a": 0.5}, {"width/a": 0.2, "depth/a": 0.9}, "not_flat"),
    ],
)
def test_flat_means_below_a_tenth_where_standard_shows_three_tenths(
    own: dict[str, float], control: dict[str, float], verdict: str
) -> None:
    check = check_of(own, control)
    assert check.verdict == verdict
    assert json.loads(json.dumps(check.to_dict(), allow_nan=False))["verdict"] == verdict


def test_a_verdict_is_told_with_the_steepest_slopes_and_the_way_out() -> None:
    told = sentence(
        check_of({"width/logits": -0.2, "width/attention": 0.1}, {"width/logits": 0.1, "width/attention": -0.2}),
        "width",
    )
    assert told == (
        "width: not flat. Steepest under completep: logits -0.20; under standard: attention -0.20. Flat is below 0.1. A slope that falls is "
        "often chance that larger sizes average out: more --steps, larger sizes, more --seeds."
    )
    told = sentence(check_of({"width/logits": 0.0}, {"width/logits": 0.1}), "width")
    assert told.endswith(
        "Standard must show more than 0.3, or the check could not have told: a higher --lr, more --steps or larger sizes."
    )


def test_the_recipes_own_parametrization_is_checked_and_a_standard_one_starts_from_the_smallest_sizes() -> None:
    assert choose_kind(small(MuP())) == "mup"
    assert choose_kind(small(CompleteP())) == choose_kind(small()) == "completep"
    assert choose_kind(small(CompleteP()), "mup") == "mup"
    plan = Plan(config=small(), kind="completep", widths=(16, 32, 64), depths=(1, 2, 4), steps=1, seeds=1)
    check = check_coordinates(plan, ALONE)
    assert check.to_dict()["parametrization"] == {
        "kind": "completep",
        "base_d_model": 16,
        "base_d_head": 0,
        "base_num_layers": 1,
        "alpha": 1.0,
    }
    assert [(r.axis, r.size) for r in check.readings if not r.control] == [
        *(("width", width) for width in (16, 32, 64)),
        *(("depth", depth) for depth in (1, 2, 4)),
    ]
    assert (
        check.slopes.keys()
        == check.control_slopes.keys()
        == {f"{a}/{q}" for a in ("width", "depth") for q in QUANTITIES}
    )
    # at the base both are one model
    own, control = (r for r in check.readings if r.axis == "depth" and r.size == 1)
    assert own.steps[1].sizes == control.steps[1].sizes
    mine = MuP(base_d_model=24)
    kept = check_coordinates(Plan(config=small(mine), kind="mup", widths=(16, 32, 64), steps=1, seeds=1), ALONE)
    assert {r.model.parametrization for r in kept.readings} == {mine, Standard()}
    page = coordinate_page(check)
    assert page.count("<svg") == 2 * 2 * len(QUANTITIES)
    assert "http" not in page.replace("http-equiv", "")


def test_a_model_whose_updates_were_refused_has_no_slope_and_no_flat_verdict() -> None:
    from_start = Plan(config=small(MuP()), kind="mup", widths=(16, 32, 64), steps=1, seeds=1)
    check = check_coordinates(from_start, ALONE)
    readings = [
        dataclasses.replace(r, steps=(r.steps[0], dataclasses.replace(r.steps[1], refused=r.size == 64)))
        for r in check.readings
    ]
    slopes = _slopes(readings, False)
    assert slopes.keys() == check.slopes.keys()
    assert all(math.isnan(slope.value) for slope in slopes.values())
    assert dataclasses.replace(check, slopes=slopes).verdict == "not_flat"
    assert check.readings[0].steps[1].refused == 0


def test_measurements_of_the_recipe_that_a_small_batch_cannot_have_are_left_out() -> None:
    config = small(MuP())
    config = dataclasses.replace(config, log=dataclasses.replace(config.log, noise_every=1, noise_pieces=4))
    assert check_coordinates(Plan(config=config, kind="mup", widths=(16, 32, 64), steps=1, seeds=1), ALONE).slopes


def test_a_plan_without_three_sizes_is_refused_with_every_mistake() -> None:
    plan = Plan(config=small(), kind="completep", widths=(64, 64, 128), depths=(0, 1, 2), steps=0)
    with pytest.raises(ConfigError) as error:
        check_coordinates(plan, ALONE)
    assert error.value.problems == (
        "widths 64,64,128: a slope with an interval needs three different sizes, all above 0",
        "depths 0,1,2: a slope with an interval needs three different sizes, all above 0",
        "steps 0: at least 1",
    )


def test_parts_of_the_users_own_are_checked_as_they_are() -> None:
    custom = Custom(build="model.out_of_tree:build", kwargs={"width": 8})
    plan = Plan(config=small(attention=custom), kind="mup", widths=(16, 32, 64), steps=1, seeds=1)
    check = check_coordinates(plan, ALONE)
    assert check.slopes.keys() == {f"width/{name}" for name in QUANTITIES if name != "attention_logits"}
    assert all(math.isfinite(slope.value) for slope in check.slopes.values())
    assert coordinate_page(check).count("<svg") == 2 * (len(QUANTITIES) - 1)


def test_the_command_prints_a_verdict_writes_a_page_and_refuses_bad_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--widths", "16,32,64", "--depths", "", "--steps", "1", "--seeds", "1", "--lr", "1e-3"]
    words = [
        "coordcheck",
        "tiny",
        *sizes,
        "--out",
        str(tmp_path),
        "--parallel.device",
        "cpu",
        "--model.num_layers",
        "1",
    ]
    assert main.main([*words, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["verdict"] in ("flat", "not_flat", "inconclusive")
    assert facts["lr"] == 1e-3
    assert facts["slopes"].keys() == facts["control_slopes"].keys() == {f"width/{name}" for name in QUANTITIES}
    assert all(slope.keys() == {"value", "low", "high"} for slope in facts["slopes"].values())
    assert "coordinates" in json.loads((tmp_path / "coordcheck.json").read_text())
    assert (tmp_path / "coordcheck.html").read_text().startswith("<!doctype html>")
    assert main.main([*words, "--parametrization", "mup"]) == 0
    assert "verdict: " in capsys.readouterr().out
    for wrong, message in (
        (["--widths", "64,x"], "--widths 64,x: 'x' is not a whole number; give them as 64,128,256\n"),
        (["--parametrization", "mupp"], "parametrization = 'mupp' is not one of mup, completep; nearest: 'mup'\n"),
        (["--lr", "-1"], "optim.lr=-1.0 must be above 0\n"),
    ):
        assert main.main([*words, *wrong]) == 2
        assert capsys.readouterr().err == message
