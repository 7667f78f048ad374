"""The cures are off by default, read and written like any setting, and refused where they would do nothing."""

import dataclasses

import pytest

from sample_config import tiny
from surefoot.config.codec import from_dict, to_dict
from surefoot.config.data import NoRepetitionMask, RepetitionMask
from surefoot.config.fingerprint import fingerprint
from surefoot.config.optim import AdaGC, GlobalNorm, ZClip
from surefoot.config.run import RunConfig
from surefoot.config.validate import validate


def cured(**cures: object) -> RunConfig:
    cfg = tiny()
    parts = {"clipping": "optim", "embedding_gradient": "model", "repetition": "data"}
    for name, value in cures.items():
        part = parts[name]
        cfg = dataclasses.replace(cfg, **{part: dataclasses.replace(getattr(cfg, part), **{name: value})})
    return cfg


def test_they_are_off_unless_asked_for() -> None:
    cfg = tiny()
    assert cfg.optim.clipping == GlobalNorm()
    assert cfg.data.repetition == NoRepetitionMask()
    assert (cfg.model.embedding_gradient, cfg.model.loss.z_loss) == (1.0, 0.0)


@pytest.mark.parametrize(
    "cures",
    [
        {"clipping": ZClip(alpha=0.9)},
        {"clipping": AdaGC()},
        {"repetition": RepetitionMask()},
        {"embedding_gradient": 0.1},
    ],
)
def test_they_are_written_and_read_back_and_make_another_run(cures: dict[str, object]) -> None:
    cfg = cured(**cures)
    assert validate(cfg) == []
    assert from_dict(RunConfig, to_dict(cfg)) == cfg
    assert fingerprint(cfg) != fingerprint(tiny())


@pytest.mark.parametrize(
    ("cures", "text"),
    [
        (
            {"clipping": ZClip(warmup_steps=600)},
            "optim.clipping.warmup_steps=600 leaves none of steps=600 that is clipped by 'zclip'; it must be below 600",
        ),
        (
            {"repetition": RepetitionMask(count=300)},
            "data.repetition.count=300 has no effect: a row of data.seq_len=256 tokens cannot repeat one so often; at most 256",
        ),
        ({"clipping": AdaGC(ratio=0.9)}, "optim.clipping.ratio=0.9 must be at least 1"),
        ({"clipping": ZClip(warmup_steps=1)}, "optim.clipping.warmup_steps=1 must be at least 2"),
        ({"embedding_gradient": 0.0}, "model.embedding_gradient=0.0 must be above 0 and at most 1"),
        ({"repetition": RepetitionMask(max_period=0)}, "data.repetition.max_period=0 must be at least 1"),
    ],
)
def test_what_cannot_work_or_does_nothing_is_refused(cures: dict[str, object], text: str) -> None:
    assert validate(cured(**cures)) == [text]
