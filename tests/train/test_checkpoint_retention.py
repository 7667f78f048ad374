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


def test_certified_ones_stay_as_a_ladder_of_three() -> None:
    assert steps(to_delete(NAMES, keep_last=1, certified={NAMES[0], NAMES[1]})) == [300, 400]
    assert steps(to_delete(NAMES, keep_last=2, certified={NAMES[4], NAMES[0]})) == [200, 300]
    assert steps(to_delete(NAMES, keep_last=1, certified={"step-000999-attempt-0001"})) == [100, 200, 300, 400]
    assert steps(to_delete(NAMES, keep_last=1, certified=set(NAMES))) == [100, 300]
    many = [checkpoint_name(step, 1) for step in range(100, 1300, 100)]
    kept = [name for name in many if name not in to_delete(many, keep_last=1, certified=set(many))]
    assert steps(kept) == [900, 1100, 1200]


@pytest.mark.parametrize("lag", [0, 2])
def test_while_a_run_goes_on_the_ladder_always_has_its_rungs(lag: int) -> None:
    """Pruned after every checkpoint, as a run does; a checkpoint is certified ``lag`` checkpoints later."""
    alive: list[str] = []
    for number in range(1, 60):
        alive.append(checkpoint_name(100 * number, 1))
        certified = {name for name in alive if parse_checkpoint_name(name)[0] <= 100 * (number - lag)}
        doomed = to_delete(alive, keep_last=lag + 1, certified=certified)
        alive = [name for name in alive if name not in doomed]
        ages = sorted(100 * (number - lag) - step for step in steps([name for name in alive if name in certified]))
        if number > lag + 5:
            assert ages[:2] == [0, 100]
            assert 200 <= ages[2] < 400
            assert len(ages) == 3


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
