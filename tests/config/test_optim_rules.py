"""What an optimiser must not be told, for every kind and role: too much decay, and settings without effect."""

import pytest

from sample_config import tiny
from surefoot.config.codec import resolve
from surefoot.config.errors import ConfigError

OVER = "one step would turn the weights over; it must be below 1"
MUON = ("--optim.optimizer.kind=muon", "--optim.optimizer.others.kind=adamw")
SHARE = "with optim.decay='independent' is the share of a weight that every step at the peak rate takes off, whatever optim.lr"


def problems_of(*flags: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        resolve(tiny(), [], list(flags))
    return [problem.partition(": ")[2] for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (
            ["--optim.optimizer.kind=stable_adamw", "--optim.lr=10"],
            f"optim.lr=10.0 times weight_decay=0.1 is 1: {OVER}",
        ),
        (
            ["--optim.optimizer.kind=lion", "--optim.lr=2"],
            f"optim.lr=2.0 times weight_decay=1.0 is 2: {OVER}",
        ),
        (
            ["--optim.lr=0.1", "--optim.roles.hidden.lr=200"],
            f"optim.lr=0.1 times optim.roles.hidden.lr=200.0 times weight_decay=0.1 is 2: {OVER}",
        ),
        (
            ["--optim.optimizer.kind=lion", "--optim.roles.embedding.decay=500"],
            f"optim.lr=0.003 times weight_decay=1.0 times optim.roles.embedding.decay=500.0 is 1.5: {OVER}",
        ),
        (
            [*MUON, "--optim.optimizer.others.weight_decay=20", "--optim.lr=0.1"],
            f"optim.lr=0.1 times optim.optimizer.others.weight_decay=20.0 is 2: {OVER}",
        ),
        (
            ["--optim.optimizer.kind=muon", "--optim.optimizer.weight_decay=400"],
            f"optim.lr=0.003 times weight_decay=400.0 is 1.2: {OVER}",
        ),
    ],
)
def test_a_step_that_takes_more_than_the_weight_is_told_with_all_that_makes_it(flags: list[str], problem: str) -> None:
    assert problems_of(*flags) == [problem]


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ([], f"optim.optimizer.weight_decay=0.1 {SHARE}; it must be below 0.1, and 1e-4 is usual"),
        (
            ["--optim.optimizer.weight_decay=0.01", "--optim.roles.output.decay=20"],
            f"optim.optimizer.weight_decay=0.01 times optim.roles.output.decay=20.0 {SHARE}; it must be below 0.1, and 1e-4 is usual",
        ),
        (
            ["--optim.optimizer.kind=muon", "--optim.optimizer.weight_decay=1e-4"],
            f"optim.optimizer.others.weight_decay=0.1 {SHARE}; it must be below 0.1, and 1e-4 is usual",
        ),
    ],
)
def test_independent_decay_is_not_in_units_of_the_rate(flags: list[str], problem: str) -> None:
    assert problems_of("--optim.decay=independent", *flags) == [problem]
    resolve(tiny(), [], ["--optim.decay=independent", "--optim.optimizer.weight_decay=1e-4", "--optim.lr=3"])


def test_a_penalty_is_not_a_decay() -> None:
    assert problems_of("--optim.optimizer.kind=adam", "--optim.decay=independent") == [
        "optim.decay='independent' has no meaning under optim.optimizer.kind='adam', whose weight_decay is an L2 penalty in the gradient; "
        "take kind='adamw', or leave decay='decoupled'"
    ]
    resolve(tiny(), [], ["--optim.optimizer.kind=adam", "--optim.optimizer.weight_decay=500"])


RAMPED = [
    "--data.batch_size=32",
    "--data.batch_stages=[{start_batch=2, batch_size=64}, {start_batch=4, batch_size=128}]",
]
RAMP = "optim.ramp_lr='linear' at data.batch_stages.1.batch_size, 4,"


def test_the_largest_batch_of_a_ramp_is_what_must_not_turn_the_weights_over() -> None:
    linear = [*RAMPED, "--optim.ramp_lr=linear", "--optim.optimizer.weight_decay=1"]
    assert problems_of(*linear, "--optim.lr=0.25") == [
        f"optim.lr=0.25 times {RAMP} times weight_decay=1.0 is 1: {OVER}"
    ]
    resolve(tiny(), [], [*linear, "--optim.lr=0.24"])
    resolve(tiny(), [], [*linear, "--optim.lr=0.49", "--optim.ramp_lr=sqrt"])
    resolve(tiny(), [], [*linear, "--optim.lr=0.9", "--optim.ramp_lr=none"])
    falling = ["--data.batch_stages=[{start_batch=2, batch_size=8}]", "--optim.ramp_lr=linear"]
    assert problems_of(*falling, "--optim.lr=10") == [f"optim.lr=10.0 times weight_decay=0.1 is 1: {OVER}"]


def test_a_ramp_takes_independent_decay_with_it() -> None:
    ramped = [*RAMPED, "--optim.ramp_lr=linear", "--optim.decay=independent"]
    assert problems_of(*ramped, "--optim.optimizer.weight_decay=0.03") == [
        f"optim.optimizer.weight_decay=0.03 times {RAMP} {SHARE}; it must be below 0.1, and 1e-4 is usual"
    ]
    resolve(tiny(), [], [*ramped, "--optim.optimizer.weight_decay=0.02"])


def test_an_epsilon_for_a_role_whose_rule_has_none_is_told() -> None:
    assert problems_of("--optim.optimizer.kind=lion", "--optim.roles.norm.eps=2") == [
        "optim.roles.norm.eps=2.0 has no effect: optim.optimizer.kind='lion' has no epsilon; leave it 1"
    ]
    assert problems_of("--optim.optimizer.kind=muon", "--optim.roles.hidden.eps=2", "--optim.roles.norm.eps=2") == [
        "optim.roles.hidden.eps=2.0 has no effect: optim.optimizer.kind='muon' has no epsilon; leave it 1"
    ]
    assert problems_of(
        "--optim.optimizer.kind=muon", "--optim.optimizer.others.kind=lion", "--optim.roles.norm.eps=2"
    ) == ["optim.roles.norm.eps=2.0 has no effect: optim.optimizer.others.kind='lion' has no epsilon; leave it 1"]
    resolve(tiny(), [], ["--optim.optimizer.kind=stable_adamw", "--optim.roles.norm.eps=2"])


def test_narrow_moments_of_an_fp64_run_are_told() -> None:
    assert problems_of("--optim.moments=bf16", "--parallel.precision=fp64") == [
        "optim.moments='bf16' would lose the digits that parallel.precision='fp64' is for; leave 'fp32': moments are fp64 there"
    ]
    resolve(tiny(), [], ["--optim.moments=bf16", "--parallel.precision=fp32"])


def test_the_setting_that_was_given_is_the_one_that_is_pointed_at() -> None:
    with pytest.raises(ConfigError, match=r"^--optim.roles.hidden.lr: optim.lr=0.003 times optim.roles.hidden.lr=9000"):
        resolve(tiny(), [], ["--optim.roles.hidden.lr=9000"])
