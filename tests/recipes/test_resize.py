"""A config at another width, depth or parametrization."""

import dataclasses

import pytest

from sample_config import tiny
from surefoot.config.errors import ConfigError
from surefoot.config.model import CompleteP, Custom, GroupedQueryAttention, MuP, Standard, SwiGLU
from surefoot.config.run import RunConfig
from surefoot.recipes.resize import nearest_of_width, with_depth, with_parametrization, with_width


def sizes(config: RunConfig) -> tuple[int, int, int, int, int]:
    """d_model, heads, key heads, head width, d_ff."""
    model = config.model
    assert isinstance(model.attention, GroupedQueryAttention)
    assert isinstance(model.feed_forward, SwiGLU)
    heads = (model.attention.num_heads, model.attention.num_kv_heads, model.attention.d_head)
    return model.d_model, *heads, model.feed_forward.d_ff


def test_a_wider_model_has_more_heads_of_the_same_width_and_all_else_stays() -> None:
    base = tiny()
    assert sizes(with_width(base, 576)) == (576, 18, 6, 32, 1536)
    assert sizes(with_width(base, 96)) == (96, 3, 1, 32, 256)
    assert with_width(with_width(base, 576), 192) == base


def test_a_width_without_whole_numbers_is_refused_with_those_that_have() -> None:
    with pytest.raises(ConfigError) as error:
        with_width(tiny(), 64)
    text = "d_model=64 gives no whole num_kv_heads in proportion to 2 at 192; multiples of 96 do"
    assert str(error.value) == text
    assert sizes(with_width(tiny(), 96 * 5))[:3] == (480, 15, 5)
    odd = dataclasses.replace(tiny(), model=dataclasses.replace(tiny().model, feed_forward=SwiGLU(d_ff=509)))
    with pytest.raises(ConfigError, match="gives no whole d_ff in proportion to 509 at 192; multiples of 192 do"):
        with_width(odd, 96)


@pytest.mark.parametrize(
    ("own", "width", "narrow"),
    [
        # d_model, heads, key heads, head width, d_ff
        ((192, 6, 2, 32, 512), 64, (64, 2, 1, 32, 171)),
        ((4096, 32, 8, 128, 14336), 64, (64, 2, 1, 32, 224)),
        ((4096, 32, 8, 128, 14336), 512, (512, 4, 1, 128, 1792)),
        ((1024, 16, 8, 128, 3072), 64, (64, 2, 1, 64, 192)),
        ((64, 4, 4, 16, 256), 64, (64, 4, 4, 16, 256)),
    ],
)
def test_a_narrow_stand_in_keeps_proportions_as_far_as_whole_numbers_allow(
    own: tuple[int, ...], width: int, narrow: tuple[int, ...]
) -> None:
    d_model, heads, kv_heads, d_head, d_ff = own
    attention = GroupedQueryAttention(num_heads=heads, num_kv_heads=kv_heads, d_head=d_head)
    model = dataclasses.replace(tiny().model, d_model=d_model, attention=attention, feed_forward=SwiGLU(d_ff=d_ff))
    found = nearest_of_width(dataclasses.replace(tiny(), model=model), width)
    assert sizes(found) == narrow
    assert sizes(with_width(found, 4 * width)) == (4 * width, 4 * narrow[1], 4 * narrow[2], narrow[3], 4 * narrow[4])


def test_parts_of_the_users_own_stay_as_they_are() -> None:
    model = dataclasses.replace(tiny().model, attention=Custom(build="a:b"), feed_forward=Custom(build="c:d"))
    wider = with_width(dataclasses.replace(tiny(), model=model), 257)
    assert wider.model == dataclasses.replace(model, d_model=257)
    assert nearest_of_width(wider, 64).model == dataclasses.replace(model, d_model=64)


def test_depth_and_parametrization_change_nothing_else() -> None:
    assert with_depth(with_depth(tiny(), 9), tiny().model.num_layers) == tiny()
    assert with_depth(tiny(), 9).model.num_layers == 9
    assert with_parametrization(tiny(), "mup").model.parametrization == MuP(base_d_model=192)
    completep = with_parametrization(tiny(), "completep")
    assert completep.model.parametrization == CompleteP(base_d_model=192, base_num_layers=4)
    assert with_parametrization(completep, "standard") == tiny()
    assert with_parametrization(tiny(), "standard").model.parametrization == Standard()
    with pytest.raises(ConfigError, match="parametrization 'ntk': one of standard, mup, completep"):
        with_parametrization(tiny(), "ntk")
