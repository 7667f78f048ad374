"""Which checkpoints stay."""

import pytest

from surefoot.train.retention import checkpoint_name, parse_checkpoint_name, to_delete

NAMES = [checkpoint_name(step, 1) for step in (100, 200, 300, 400, 500)]


def steps(names: list[str]) -> list[int]:
    return [parse_checkpoint_name(name)[0] for name in names]


def test_the_last_few_stay() -> None:
    assert steps(to_delete(NAMES, keep_last=2)) == [100, 200, 300]
    assert to_delete(NAMES, keep_last=9) == []
    assert to_delete([], keep_last=1) == []


def test_every_nth_stays_for_good() -> None:
    assert steps(to_delete(NAMES, keep_last=1, keep_every=200)) == [100, 300]


def test_the_newest_certified_one_stays_and_older_certified_ones_go() -> None:
    assert steps(to_delete(NAMES, keep_last=1, certified={NAMES[0], NAMES[1]})) == [100, 300, 400]
    assert steps(to_delete(NAMES, keep_last=2, certified={NAMES[4], NAMES[0]})) == [100, 200, 300]
    assert steps(to_delete(NAMES, keep_last=1, certified={"step-000999-attempt-0001"})) == [100, 200, 300, 400]


def test_names_go_there_and_back_and_others_are_refused() -> None:
    assert checkpoint_name(400, 1) == "step-000400-attempt-0001"
    assert parse_checkpoint_name("step-000400-attempt-0001") == (400, 1)
    assert parse_checkpoint_name(checkpoint_name(12_345_678, 12_345)) == (12_345_678, 12_345)
    for name in ("step-400", "step-000400-attempt-0001.tmp", "xstep-000400-attempt-0001", ""):
        with pytest.raises(ValueError, match="is not a checkpoint's name; expected the form step-000400-attempt-0001"):
            parse_checkpoint_name(name)


def test_settings_that_would_leave_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="keep_last=0: at least 1 checkpoint is kept"):
        to_delete(NAMES, keep_last=0)
    with pytest.raises(ValueError, match="keep_every=-1"):
        to_delete(NAMES, keep_last=1, keep_every=-1)
