"""Promise 9: activations change alike at all widths under mup, and at all depths under completep, where under the standard parametrization they do not."""

import dataclasses
from typing import Any

import pytest
import torch

from sample_config import tiny
from surefoot.config.model import CompleteP, GroupedQueryAttention, MuP, Standard, SwiGLU
from surefoot.config.optim import AdamW, Muon
from surefoot.config.run import RunConfig
from surefoot.model import transformer
from surefoot.model.role_scaling import ROWS, Multipliers, multipliers
from surefoot.parallel.mesh import World
from surefoot.scale.coordcheck import FLAT, GROWS, Plan, check_coordinates

ALONE = World(rank=0, size=1, device=torch.device("cpu"), mesh=None)
ADAMW, MUON = AdamW(), Muon()
WIDTHS, DEPTHS = (64, 128, 256), (2, 4, 8)


def model(optimizer: Any, lr: float, *, tied: bool, qk_norm: bool = False) -> RunConfig:
    """Four query heads to two for keys and values at 64 wide, two blocks."""
    config = tiny()
    attention = GroupedQueryAttention(num_heads=4, num_kv_heads=2, d_head=16, qk_norm=qk_norm)
    network = dataclasses.replace(
        config.model,
        vocab_size=128,
        d_model=64,
        num_layers=2,
        attention=attention,
        feed_forward=SwiGLU(d_ff=128),
        tie_embeddings=tied,
    )
    optim = dataclasses.replace(config.optim, optimizer=optimizer, lr=lr)
    parallel = dataclasses.replace(config.parallel, precision="fp32", device="cpu")
    return dataclasses.replace(config, model=network, optim=optim, parallel=parallel)


@pytest.mark.parametrize(
    ("config", "seeds"),
    [
        (model(ADAMW, 3e-3, tied=True), 3),
        (model(ADAMW, 3e-3, tied=False, qk_norm=True), 3),
        (model(MUON, 3e-3, tied=True), 2),
    ],
    ids=["adamw-tied", "adamw-untied-qk-norm", "muon"],
)
def test_flat_in_width_under_mup_where_standard_is_not(config: RunConfig, seeds: int) -> None:
    check = check_coordinates(Plan(config=config, kind="mup", widths=WIDTHS, depths=(), seeds=seeds), ALONE)
    assert {name: slope for name, slope in check.slopes.items() if not abs(slope.value) < FLAT} == {}
    assert check.verdict == "flat"
    grown = {name for name, slope in check.control_slopes.items() if slope.value > GROWS}
    assert {"width/attention", "width/feed_forward", "width/residual", "width/logits"} <= grown


@pytest.mark.parametrize(
    ("config", "seeds"), [(model(ADAMW, 3e-3, tied=True), 5), (model(MUON, 1e-2, tied=True), 2)], ids=["adamw", "muon"]
)
def test_flat_in_depth_under_completep_where_standard_is_not(config: RunConfig, seeds: int) -> None:
    check = check_coordinates(Plan(config=config, kind="completep", widths=(), depths=DEPTHS, seeds=seeds), ALONE)
    assert {name: slope for name, slope in check.slopes.items() if not abs(slope.value) < FLAT} == {}
    assert check.verdict == "flat"


def wrong_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ROWS, ("adam", "hidden"), dataclasses.replace(ROWS["adam", "hidden"], lr=0.0))


def too_small_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ROWS, ("adam", "hidden"), dataclasses.replace(ROWS["adam", "hidden"], lr=-2.0))


def wrong_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ROWS, ("adam", "hidden"), dataclasses.replace(ROWS["adam", "hidden"], init=0.0))


def no_logit_multiplier(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(cfg: Any) -> Multipliers:
        return dataclasses.replace(multipliers(cfg), logits=1.0)

    monkeypatch.setattr(transformer, "multipliers", without)


@pytest.mark.parametrize("breaks", [wrong_rate, too_small_a_rate, wrong_start, no_logit_multiplier])
def test_a_broken_table_is_not_flat_in_width(breaks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    breaks(monkeypatch)
    config = model(ADAMW, 3e-3, tied=True)
    check = check_coordinates(Plan(config=config, kind="mup", widths=(32, 64, 128), depths=(), seeds=1, steps=4), ALONE)
    assert check.verdict == "not_flat"


def test_without_its_residual_multiplier_completep_is_not_flat_in_depth() -> None:
    config = model(ADAMW, 3e-3, tied=True)
    plan = Plan(config=config, kind="completep", widths=(), depths=(2, 4, 8), seeds=1)
    own = CompleteP(base_d_model=64, base_num_layers=2)
    assert check_coordinates(_own(plan, own), ALONE).slopes["depth/residual"].value < FLAT
    broken = pytest.MonkeyPatch()
    try:
        broken.setattr(transformer, "multipliers", lambda cfg: dataclasses.replace(multipliers(cfg), residual=1.0))
        assert check_coordinates(_own(plan, own), ALONE).slopes["depth/residual"].value > GROWS
    finally:
        broken.undo()


def _own(plan: Plan, own: MuP | CompleteP | Standard) -> Plan:
    network = dataclasses.replace(plan.config.model, parametrization=own)
    return dataclasses.replace(plan, config=dataclasses.replace(plan.config, model=network))
