"""What decides a run's identity and what may change when it goes on."""

import random

import pytest

from sample_config import tiny
from surefoot.config.codec import from_dict, resolve, to_dict
from surefoot.config.diff import flatten
from surefoot.config.errors import ConfigError
from surefoot.config.fingerprint import changed_computation, fingerprint, refuse_changes
from surefoot.config.run import RunConfig

FREE_FLAGS = [
    ("--log.print_every", "3"),
    ("--log.trackers", "wandb"),
    ("--checkpoint.every", "50"),
    ("--checkpoint.asynchronous", "false"),
    ("--parallel.timeout_s", "5"),
    ("--parallel.micro_batch_size", "8"),
    ("--parallel.data_parallel", "fsdp"),
    ("--parallel.tp", "2"),
    ("--parallel.cp", "2"),
    ("--parallel.pp", "2"),
    ("--parallel.recompute", "full"),
    ("--parallel.nccl.data.max_ctas", "8"),
    ("--data.cache_dir", "/elsewhere"),
    ("--guard.snapshots", "0"),
    ("--guard.snapshot_every", "7"),
    ("--guard.snapshot_budget_gib", "1"),
]
DECISIVE_FLAGS = [
    ("--steps", "601"),
    ("--seed", "1"),
    ("--determinism", "fast"),
    ("--model.init.std", "0.03"),
    ("--data.batch_size", "64"),
    ("--data.sources.1.weight", "2"),
    ("--optim.lr", "1e-3"),
    ("--optim.gated", "false"),
    ("--parallel.compile", "on"),
    ("--parallel.threads", "3"),
    ("--guard.max_consecutive_skips", "3"),
    ("--eval.every", "50"),
]


@pytest.mark.parametrize("flags", FREE_FLAGS)
def test_what_cannot_change_the_run_is_not_in_the_fingerprint(flags: tuple[str, str]) -> None:
    other = resolve(tiny(), [], flags)
    assert other != tiny()
    assert fingerprint(other) == fingerprint(tiny())
    assert changed_computation(tiny(), other) == []
    refuse_changes(tiny(), other, "runs/x")


@pytest.mark.parametrize("flags", DECISIVE_FLAGS)
def test_what_decides_the_run_is_in_the_fingerprint_and_refused_by_name(flags: tuple[str, str]) -> None:
    other = resolve(tiny(), [], flags)
    key = flags[0].removeprefix("--")
    assert fingerprint(other) != fingerprint(tiny())
    assert changed_computation(tiny(), other) == [key]
    assert changed_computation(tiny(), other, [key]) == []
    assert changed_computation(tiny(), other, [key.split(".")[0]]) == []
    refuse_changes(tiny(), other, "runs/x", [key])
    with pytest.raises(ConfigError, match=f"^{key} was "):
        refuse_changes(tiny(), other, "runs/x")


def test_the_refusal_says_what_changed_and_the_ways_out() -> None:
    other = resolve(tiny(), [], ["--optim.lr", "1e-3", "--optim.schedule.kind", "constant"])
    with pytest.raises(ConfigError) as caught:
        refuse_changes(tiny(), other, "runs/x")
    assert caught.value.problems == (
        "optim.lr was 0.003 when runs/x started and is 0.001 now",
        'optim.schedule.kind was "wsd" when runs/x started and is "constant" now',
        "optim.schedule.decay_fraction was 0.2 when runs/x started and is (absent) now",
        "optim.schedule.decay_steps was 0 when runs/x started and is (absent) now",
        'optim.schedule.shape was "linear" when runs/x started and is (absent) now',
        "optim.schedule.min_ratio was 0.0 when runs/x started and is (absent) now\n"
        "this would be another run: `surefoot fork runs/x --at STEP --set optim.lr=0.001 --set optim.schedule.kind=constant` "
        "starts one from a checkpoint, `--fresh` starts over, `--allow-change optim.lr --allow-change optim.schedule.kind "
        "--allow-change optim.schedule.decay_fraction ...` continues on your own responsibility",
    )


def test_an_allowed_key_that_does_not_exist_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"^--allow-change optim.lrr: optim.lrr is not a setting; nearest: optim.lr$"):
        refuse_changes(tiny(), tiny(), "runs/x", ["optim.lrr"])


def test_the_fingerprint_does_not_depend_on_the_order_of_keys() -> None:
    def shuffled(value: object, draw: random.Random) -> object:
        if isinstance(value, dict):
            items = list(value.items())
            draw.shuffle(items)
            return {key: shuffled(item, draw) for key, item in items}
        return [shuffled(item, draw) for item in value] if isinstance(value, list) else value

    values = shuffled(to_dict(tiny()), random.Random(1))
    assert list(flatten(values)) != list(flatten(to_dict(tiny())))
    assert fingerprint(from_dict(RunConfig, values)) == fingerprint(tiny())  # type: ignore[arg-type]


def test_the_fingerprint_is_sixteen_hex_digits_and_stays_from_process_to_process() -> None:
    assert len(fingerprint(tiny())) == 16
    assert int(fingerprint(tiny()), 16) >= 0
    assert fingerprint(tiny()) == fingerprint(tiny())
