"""A config at another width or depth: what transfers is what stays the same."""

import dataclasses
import math
from collections.abc import Iterable

from surefoot.config.errors import ConfigError
from surefoot.config.model import CompleteP, GroupedQueryAttention, MuP, Standard, SwiGLU
from surefoot.config.run import RunConfig

_LEAST_HEADS = 2
"""Heads that a narrow stand-in has at least, for which they become narrower."""


def with_width(config: RunConfig, d_model: int) -> RunConfig:
    """The same model ``d_model`` wide: heads keep their width, their number and that of key and value heads and ``d_ff`` grow in proportion.

    Parts of the user's own stay as they are: their builders read the new ``d_model``. Raises ConfigError where there are no whole
    numbers, with the widths that do.
    """
    model = config.model
    whole: dict[str, int] = {}
    if isinstance(model.attention, GroupedQueryAttention):
        whole |= {"num_heads": model.attention.num_heads, "num_kv_heads": model.attention.num_kv_heads}
    if isinstance(model.feed_forward, SwiGLU):
        whole |= {"d_ff": model.feed_forward.d_ff}
    for name, size in whole.items():
        number, rest = divmod(size * d_model, model.d_model)
        if rest or number == 0:
            raise ConfigError(
                [
                    f"d_model={d_model} gives no whole {name} in proportion to {size} at {model.d_model}; multiples of "
                    f"{_unit(model.d_model, whole.values())} do"
                ]
            )
    return _resized(config, d_model, {name: size * d_model // model.d_model for name, size in whole.items()})


def nearest_of_width(config: RunConfig, d_model: int) -> RunConfig:
    """A stand-in of about the same proportions at any width, which ``with_width`` can then grow: for looking at how things scale.

    ``d_ff`` and the numbers of heads are rounded; heads become narrower where fewer than two would be left.
    """
    model = config.model
    share = d_model / model.d_model
    sizes: dict[str, int] = {}
    if isinstance(model.attention, GroupedQueryAttention):
        attention = model.attention
        inner = max(2 * _LEAST_HEADS, attention.num_heads * attention.d_head * share)
        d_head = min(attention.d_head, int(inner / _LEAST_HEADS) // 2 * 2)
        kv_heads = max(1, round(attention.num_kv_heads * attention.d_head / d_head * share))
        group = max(1, round(inner / d_head / kv_heads))
        sizes = {"d_head": d_head, "num_kv_heads": kv_heads, "num_heads": group * kv_heads}
    if isinstance(model.feed_forward, SwiGLU):
        sizes["d_ff"] = max(1, round(model.feed_forward.d_ff * share))
    return _resized(config, d_model, sizes)


def _resized(config: RunConfig, d_model: int, sizes: dict[str, int]) -> RunConfig:
    model = config.model
    attention, feed_forward = model.attention, model.feed_forward
    if isinstance(attention, GroupedQueryAttention):
        attention = dataclasses.replace(
            attention,
            num_heads=sizes["num_heads"],
            num_kv_heads=sizes["num_kv_heads"],
            d_head=sizes.get("d_head", attention.d_head),
        )
    if isinstance(feed_forward, SwiGLU):
        feed_forward = SwiGLU(d_ff=sizes["d_ff"])
    resized = dataclasses.replace(model, d_model=d_model, attention=attention, feed_forward=feed_forward)
    return dataclasses.replace(config, model=resized)


def _unit(d_model: int, sizes: Iterable[int]) -> int:
    """The smallest width at which all of ``sizes`` at ``d_model`` are whole: its multiples are all there are."""
    return math.lcm(*(d_model // math.gcd(d_model, size) for size in sizes))


def with_depth(config: RunConfig, num_layers: int) -> RunConfig:
    """The same model with ``num_layers`` blocks."""
    return dataclasses.replace(config, model=dataclasses.replace(config.model, num_layers=num_layers))


def with_parametrization(config: RunConfig, kind: str) -> RunConfig:
    """The same model under ``standard``, ``mup`` or ``completep``, its present width and depth the base. Raises ConfigError."""
    model = config.model
    kinds: dict[str, Standard | MuP | CompleteP] = {
        "standard": Standard(),
        "mup": MuP(base_d_model=model.d_model),
        "completep": CompleteP(base_d_model=model.d_model, base_num_layers=model.num_layers),
    }
    if kind not in kinds:
        raise ConfigError([f"parametrization {kind!r}: one of {', '.join(kinds)}"])
    return dataclasses.replace(config, model=dataclasses.replace(model, parametrization=kinds[kind]))
