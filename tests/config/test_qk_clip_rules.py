"""Settings under which QK-clip could do nothing are refused, with the way out."""

import pytest

from sample_config import tiny
from surefoot.config.codec import resolve
from surefoot.config.errors import ConfigError
from surefoot.config.validate import validate


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (
            ["--model.attention.qk_norm=true"],
            "optim.qk_clip=100 has no effect under model.attention.qk_norm, which undoes any scale of queries and keys; "
            "set optim.qk_clip=0, or qk_norm=false",
        ),
        (
            ["--model.attention.kind=custom", "--model.attention.build=my.part:build"],
            "optim.qk_clip=100 cannot reach model.attention.build='my.part:build': a custom attention does not say which rows "
            "of its weights make the logits of a head; set optim.qk_clip=0",
        ),
    ],
)
def test_where_it_could_do_nothing_it_is_refused(flags: list[str], problem: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        resolve(tiny(), (), ["--optim.qk_clip=100", *flags])
    assert problem in str(refusal.value)


def test_a_negative_threshold_is_refused_and_a_plain_one_is_fine() -> None:
    with pytest.raises(ConfigError, match=r"optim\.qk_clip=-1\.0 must be at least 0"):
        resolve(tiny(), (), ["--optim.qk_clip=-1"])
    assert validate(resolve(tiny(), (), ["--optim.qk_clip=100"])) == []
