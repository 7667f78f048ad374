"""The table of the parametrizations: the standard one at the base sizes to the bit, hand-computed numbers elsewhere, a source for each row."""

import dataclasses
import re
from typing import Any, get_args

import pytest
import torch

from sample_config import tiny
from surefoot.config.model import CompleteP, GroupedQueryAttention, MuP, Standard, SwiGLU
from surefoot.config.optim import MUON_ROLES, Adam, AdamW, Lion, Muon, OptimConfig, RolesConfig, RoleSettings
from surefoot.config.run import RunConfig
from surefoot.model.parametrization import draw_parameter
from surefoot.model.role_scaling import ROWS, Role, in_branch, init_depth, multipliers, scaling
from surefoot.optim.build import setting_of
from surefoot.parallel.digest import digest_tensors
from surefoot.parallel.mesh import World
from surefoot.recipes.resize import with_depth, with_width
from surefoot.scale.coord_data import synthetic_batch
from surefoot.train.setup import set_up
from surefoot.train.step import train_step

ADAMW = AdamW()
ALONE = World(rank=0, size=1, device=torch.device("cpu"), mesh=None)
NAMES: dict[str, Role] = {
    "embedding.weight": "embedding",
    "head.weight": "output",
    "norm.weight": "norm",
    "blocks.0.attention_norm.weight": "norm",
    "blocks.0.attention.query.weight": "hidden",
    "blocks.0.attention.query.bias": "bias",
    "blocks.0.feed_forward.router.weight": "router",
    "blocks.0.feed_forward.up.weight": "expert",
    "blocks.0.attention.compress.weight": "latent",
}


def small(
    parametrization: Any, optimizer: Any = ADAMW, *, tied: bool = True, wide: int = 1, deep: int = 1
) -> RunConfig:
    """A model 32 wide and 2 deep, ``wide`` and ``deep`` times as large."""
    config = tiny()
    model = dataclasses.replace(
        config.model,
        vocab_size=61,
        d_model=32,
        num_layers=2,
        attention=GroupedQueryAttention(num_heads=4, num_kv_heads=2, d_head=8, qk_norm=True),
        feed_forward=SwiGLU(d_ff=48),
        tie_embeddings=tied,
        parametrization=parametrization,
    )
    data = dataclasses.replace(config.data, batch_size=2, seq_len=12, document_mask=False)
    parallel = dataclasses.replace(config.parallel, precision="fp32", device="cpu", compile="off")
    optim = OptimConfig(optimizer=optimizer, lr=1e-2, warmup_steps=1)
    config = dataclasses.replace(config, steps=9, model=model, data=data, optim=optim, parallel=parallel)
    return with_depth(with_width(config, 32 * wide), 2 * deep)


def weights_after_three_steps(config: RunConfig) -> str:
    setup, state = set_up(config, ALONE)
    batch = synthetic_batch(config)
    for index in range(3):
        assert not train_step(state, dataclasses.replace(batch, batch_index=index), setup).skipped
    return str(digest_tensors(state.tensors(), None))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("optimizer", [AdamW(), Adam(weight_decay=0.1), Muon()], ids=lambda o: o.kind)
def test_at_the_base_sizes_every_parametrization_is_the_standard_one_to_the_bit(optimizer: Any, tied: bool) -> None:
    base = weights_after_three_steps(small(Standard(), optimizer, tied=tied))
    for parametrization in (
        MuP(base_d_model=32),
        MuP(base_d_model=32, base_d_head=8),
        CompleteP(base_d_model=32, base_num_layers=2, base_d_head=8),
        CompleteP(base_d_model=32, base_num_layers=2, alpha=0.5),
    ):
        assert weights_after_three_steps(small(parametrization, optimizer, tied=tied)) == base
    for other in (MuP(base_d_model=16), CompleteP(base_d_model=32, base_num_layers=1)):
        assert weights_after_three_steps(small(other, optimizer, tied=tied)) != base


# four times as wide, twice as deep: (rate, decay per rate, epsilon), of 1, 0.1 and 1e-8 at the base
ADAMW_MUP = {
    "embedding.weight": (1.0, 0.0, 2.5e-9),
    "head.weight": (1.0, 0.1, 2.5e-9),
    "norm.weight": (1.0, 0.0, 2.5e-9),
    "blocks.0.attention_norm.weight": (1.0, 0.0, 2.5e-9),
    "blocks.0.attention.query.weight": (0.25, 0.4, 2.5e-9),
    "blocks.0.attention.query.bias": (1.0, 0.0, 2.5e-9),
    "blocks.0.feed_forward.router.weight": (0.25, 0.4, 2.5e-9),
    "blocks.0.feed_forward.up.weight": (0.25, 0.4, 2.5e-9),
    "blocks.0.attention.compress.weight": (0.25, 0.4, 2.5e-9),
}
ADAMW_COMPLETEP = {name: (lr, wd, 1.25e-9 if in_branch(name) else eps) for name, (lr, wd, eps) in ADAMW_MUP.items()}
HALF = 2**-0.5
ADAMW_DEPTH_MUP = {
    name: (lr * HALF, wd, eps * HALF) if in_branch(name) else (lr, wd, eps) for name, (lr, wd, eps) in ADAMW_MUP.items()
}
MUON_MUP = ADAMW_MUP | {name: (0.5, 0.2, 0.0) for name, role in NAMES.items() if role in MUON_ROLES}
MUON_COMPLETEP = ADAMW_COMPLETEP | {name: MUON_MUP[name] for name, role in NAMES.items() if role in MUON_ROLES}


@pytest.mark.parametrize(
    ("parametrization", "optimizer", "expected"),
    [
        (MuP(base_d_model=32), AdamW(), ADAMW_MUP),
        (CompleteP(base_d_model=32, base_num_layers=2), AdamW(), ADAMW_COMPLETEP),
        (CompleteP(base_d_model=32, base_num_layers=2, alpha=0.5), AdamW(), ADAMW_DEPTH_MUP),
        (MuP(base_d_model=32), Muon(), MUON_MUP),
        (CompleteP(base_d_model=32, base_num_layers=2), Muon(), MUON_COMPLETEP),
    ],
    ids=["adamw-mup", "adamw-completep", "adamw-depth-mup", "muon-mup", "muon-completep"],
)
def test_settings_at_four_times_the_width_and_twice_the_depth(
    parametrization: Any, optimizer: Any, expected: dict[str, tuple[float, float, float]]
) -> None:
    config = small(parametrization, optimizer, wide=4, deep=2)
    found = {}
    for name, role in NAMES.items():
        setting = setting_of(name, role, config.optim, config.model)
        found[name] = (setting.lr, setting.weight_decay, setting.eps)
    assert found == {name: pytest.approx(numbers, rel=1e-12) for name, numbers in expected.items()}


def test_what_a_step_takes_off_a_weight_is_the_same_at_all_sizes() -> None:
    name = "blocks.0.attention.query.weight"
    for parametrization in (MuP(base_d_model=32), CompleteP(base_d_model=32, base_num_layers=2)):
        for optimizer in (AdamW(), Muon(), Lion()):
            for independent in (False, True):
                taken = []
                for wide, deep in ((1, 1), (4, 1), (4, 8)):
                    config = small(parametrization, optimizer, wide=wide, deep=deep)
                    decay = "independent" if independent else "decoupled"
                    setting = setting_of(name, "hidden", dataclasses.replace(config.optim, decay=decay), config.model)
                    taken.append(config.optim.lr * setting.lr * setting.weight_decay)
                weight_decay = optimizer.weight_decay * (1.0 if independent else config.optim.lr)
                assert taken == pytest.approx([weight_decay] * 3, rel=1e-12)
    roles = RolesConfig(hidden=RoleSettings(lr=2.0, eps=3.0))
    config = small(MuP(base_d_model=32), wide=4)
    setting = setting_of(name, "hidden", dataclasses.replace(config.optim, roles=roles), config.model)
    assert (setting.lr, setting.weight_decay) == pytest.approx((0.5, 0.4), rel=1e-12)
    assert setting.eps == pytest.approx(0.75e-8, rel=1e-12)


def test_the_penalty_of_adam_keeps_its_share_of_gradients_that_shrink_with_width() -> None:
    """A step takes lr * penalty * w / |g| off: hidden matrices 1/m of 1 of 1/m, an output 1 of 1/m of 1/m."""
    config = small(MuP(base_d_model=32), Adam(weight_decay=0.1), wide=4)
    hidden = setting_of("blocks.0.attention.query.weight", "hidden", config.optim, config.model)
    output = setting_of("head.weight", "output", config.optim, config.model)
    assert (hidden.weight_decay, output.weight_decay) == pytest.approx((0.1, 0.025), rel=1e-12)


def test_the_forward_multiplies_as_published() -> None:
    mup = multipliers(small(MuP(base_d_model=32), wide=4, deep=2).model)
    assert (mup.embedding, mup.residual, mup.logits, mup.attention) == (1.0, 1.0, 0.25, 1.0)
    deep = multipliers(small(CompleteP(base_d_model=32, base_num_layers=2), wide=4, deep=2).model)
    assert (deep.embedding, deep.residual, deep.logits, deep.attention) == (1.0, 0.5, 0.25, 1.0)
    half = multipliers(small(CompleteP(base_d_model=32, base_num_layers=2, alpha=0.5), deep=2).model)
    assert half.residual == pytest.approx(2**-0.5)
    # q k^T / d at heads twice as wide: sqrt(4) / 8 = 1 / sqrt(8) times 2^-1/2
    heads = multipliers(small(MuP(base_d_model=32, base_d_head=4)).model)
    assert heads.attention == pytest.approx(2**-0.5)
    own = dataclasses.replace(small(MuP(base_d_model=32), wide=4).model, embedding_multiplier=3.0, logit_multiplier=2.0)
    assert (multipliers(own).embedding, multipliers(own).logits) == (3.0, 0.5)


def test_matrices_start_smaller_by_the_root_of_the_width_and_writers_by_the_base_depth() -> None:
    def std(config: RunConfig, name: str, role: Role, *, writes: bool = False) -> float:
        model = dataclasses.replace(config.model, init=dataclasses.replace(config.model.init, truncate=0.0))
        shape, seed = (300, 400), config.seed
        return float(draw_parameter(name, shape, role, model, seed, torch.float64, writes_residual=writes).std())

    for parametrization in (MuP(base_d_model=32), CompleteP(base_d_model=32, base_num_layers=2)):
        config = small(parametrization, wide=4, deep=2)
        assert std(config, "embedding.weight", "embedding") == pytest.approx(0.02, rel=0.01)
        assert std(config, "head.weight", "output") == pytest.approx(0.02, rel=0.01)
        for role in ("hidden", "router", "expert", "latent"):
            assert std(config, "blocks.0.attention.query.weight", role) == pytest.approx(0.01, rel=0.01)
        layers = 4 if isinstance(parametrization, MuP) else 2
        assert init_depth(config.model) == layers
        writer = std(config, "blocks.0.attention.output.weight", "hidden", writes=True)
        assert writer == pytest.approx(0.01 / (2 * layers) ** 0.5, rel=0.01)


def test_every_role_has_a_row_under_its_optimisers_and_every_row_names_its_source() -> None:
    assert {role for family, role in ROWS if family == "adam"} == set(get_args(Role))
    assert {role for family, role in ROWS if family == "muon"} == MUON_ROLES
    for row in ROWS.values():
        assert re.search(r"arXiv:\d{4}\.\d{5}", row.source)
    with pytest.raises(KeyError):
        scaling("embedding", "muon", small(MuP()).model, branch=False)
