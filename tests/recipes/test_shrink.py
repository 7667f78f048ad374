"""A recipe made small keeps what can go wrong, and fits every layout that parity runs."""

import dataclasses
from typing import Any

import pytest

from surefoot.config.data import BatchStage, LengthStage, RepetitionMask
from surefoot.config.model import CompleteP, Custom, GroupedQueryAttention, LossConfig, MuP
from surefoot.config.optim import AdaGC, Lion, Muon, Power, ZClip
from surefoot.config.run import ByTokens, RunConfig
from surefoot.config.validate import validate
from surefoot.recipes.shrink import CLIP_NORM, D_HEAD, D_MODEL, NUM_HEADS, NUM_LAYERS, SEQ_LEN, shrink
from surefoot.recipes.tiny import tiny


def changed(part: str, **settings: Any) -> RunConfig:
    config = tiny()
    return dataclasses.replace(config, **{part: dataclasses.replace(getattr(config, part), **settings)})


def test_the_small_recipe_is_legal_on_one_rank_and_on_eight() -> None:
    config = shrink(tiny())
    assert validate(config, 1) == validate(config, 8) == []


def test_it_divides_over_four_tensor_pipeline_and_context_ranks() -> None:
    model, data = shrink(tiny()).model, shrink(tiny()).data
    assert isinstance(model.attention, GroupedQueryAttention)
    for size in (model.vocab_size, model.attention.num_heads, model.attention.num_kv_heads, data.seq_len):
        assert size % 4 == 0
    assert model.num_layers % (4 * 2) == 0
    assert data.seq_len % (2 * 4) == 0
    assert data.batch_size % 8 == 0


@pytest.mark.parametrize("kv_heads", [2, 6])
def test_grouped_heads_stay_grouped_and_plain_ones_plain(kv_heads: int) -> None:
    attention = dataclasses.replace(tiny().model.attention, num_kv_heads=kv_heads, qk_norm=True)  # type: ignore[arg-type]
    small = shrink(changed("model", attention=attention, tie_embeddings=False)).model
    assert isinstance(small.attention, GroupedQueryAttention)
    assert (small.attention.num_kv_heads < NUM_HEADS) == (kv_heads < 6)
    assert small.attention.qk_norm
    assert not small.tie_embeddings


def test_parts_of_the_users_own_and_weights_of_losses_are_untouched() -> None:
    part = Custom(build="somewhere:something", kwargs={"width": 3})
    small = shrink(changed("model", attention=part, feed_forward=part, norm=part, loss=LossConfig(z_loss=1e-4))).model
    assert (small.attention, small.feed_forward, small.norm) == (part, part, part)
    assert small.loss.z_loss == 1e-4


def test_a_parametrization_keeps_its_ratios() -> None:
    mup = shrink(changed("model", parametrization=MuP(base_d_model=96, base_d_head=64))).model.parametrization
    assert mup == MuP(base_d_model=D_MODEL // 2, base_d_head=2 * D_HEAD)
    deep = CompleteP(base_d_model=192, base_num_layers=6, alpha=0.5)
    small = shrink(changed("model", parametrization=deep)).model.parametrization
    assert small == CompleteP(base_d_model=D_MODEL, base_num_layers=2 * NUM_LAYERS, alpha=0.5)


@pytest.mark.parametrize("optimizer", [Lion(), Muon(momentum=0.9)])
def test_optimisers_keep_their_kind_and_numbers(optimizer: Lion | Muon) -> None:
    assert shrink(changed("optim", optimizer=optimizer)).optim.optimizer == optimizer


@pytest.mark.parametrize("clipping", [ZClip(), AdaGC()])
def test_clipping_with_a_memory_gets_through_its_warm_up(clipping: ZClip | AdaGC) -> None:
    small = shrink(changed("optim", clipping=clipping, clip_norm=0.0)).optim
    assert small.clipping.kind == clipping.kind
    assert small.clipping.warmup_steps == 2  # type: ignore[union-attr]
    assert small.clip_norm == 0.0
    assert shrink(tiny()).optim.clip_norm == CLIP_NORM


def test_schedules_ramps_and_bounds_fit_a_run_of_a_few_steps() -> None:
    config = changed("optim", schedule=Power(peak_steps=1000), warmup_steps=500, qk_clip=100.0)
    config = dataclasses.replace(
        config,
        bound=ByTokens(tokens=1e9),
        data=dataclasses.replace(
            config.data,
            seq_len=4096,
            batch_stages=(BatchStage(start_batch=100, batch_size=512), BatchStage(start_batch=900, batch_size=1024)),
            length_stages=(LengthStage(start_batch=0, seq_len=1024), LengthStage(start_batch=500, seq_len=4096)),
            repetition=RepetitionMask(),
        ),
    )
    small = shrink(config)
    assert validate(small, 8) == []
    assert small.bound.kind == "steps"
    assert [stage.start_batch for stage in small.data.batch_stages] == [1]
    assert [stage.seq_len for stage in small.data.length_stages] == [SEQ_LEN // 2, SEQ_LEN]
    assert small.data.repetition.kind == "mask"
    assert 0 < small.optim.qk_clip < 1


def test_the_layout_of_the_recipe_is_left_behind_and_its_guard_kept() -> None:
    config = changed("parallel", tp=8, pp=4, data_parallel="fsdp", precision="bf16", micro_batch_size=1)
    small = shrink(config).parallel
    assert (small.tp, small.pp, small.data_parallel, small.micro_batch_size) == (1, 1, "ddp", 0)
    assert (small.device, small.precision) == ("cpu", "bf16")
    strict = shrink(changed("guard", policy="strict"))
    assert strict.guard.policy == "strict"
