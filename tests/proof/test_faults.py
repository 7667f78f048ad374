"""Every fault of the catalogue does to a run what it says, when it says, and nothing before."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from surefoot.config.data import Exclusion
from surefoot.config.guard import GuardConfig
from surefoot.config.run import RunConfig
from surefoot.data.loader import Batch, Loader
from surefoot.data.pack import BLANK, IGNORE
from surefoot.optim.adam import FusedAdam
from surefoot.parallel.mesh import join_world
from surefoot.proof import data_faults
from surefoot.proof.data_faults import SpoiledLoader, mark, skip_healthy
from surefoot.proof.fault_catalogue import CATALOGUE, FAULTS, Fault
from surefoot.proof.faults import Bench, Dose
from surefoot.proof.step_faults import flip_bit, forget_step_count
from surefoot.proof.witness import Witness
from surefoot.train.interrupt import StopRequest
from surefoot.train.loop import train
from surefoot.train.run import OpenRun, open_run
from surefoot.train.step import split

ONSET = 6
STEPS = 10


@pytest.fixture
def observed(config: RunConfig) -> RunConfig:
    """A run of few steps that is only watched."""
    return dataclasses.replace(
        config,
        steps=STEPS,
        guard=GuardConfig(policy="observe", snapshots=0, probe_every=0),
        eval=dataclasses.replace(config.eval, every=0),
    )


@contextmanager
def opened(config: RunConfig, folder: Path) -> Iterator[OpenRun]:
    with open_run(config, folder, join_world(config.parallel), notify=lambda kind, row: None, peak=0.0) as run:
        yield run


def losses_with(config: RunConfig, folder: Path, arm: Callable[[Bench], Bench]) -> tuple[list[float], int]:
    """Training losses of every consumed batch, and the count of updates that the optimiser has at the end."""
    witness = Witness(0)
    with opened(config, folder) as run:
        bench = arm(Bench(run.setup, run.state, run.data))
        train(run.state, bench.setup, bench.data, run.keeping, stop=StopRequest(), watchers=(witness,))
        count = int(run.state.optimizer.step_count())
    return [row.loss for _, row in witness.reports], count


def dose_of(fault: Fault, **changes: object) -> Dose:
    dose = Dose(onset=ONSET, length=2, magnitude=fault.dose(0, STEPS).magnitude, seed=3)
    return dataclasses.replace(dose, **changes)  # type: ignore[arg-type]


BY_ARMING = [f for f in CATALOGUE if not f.throughout and not f.at_resume and not f.slows]


@pytest.mark.parametrize("fault", BY_ARMING, ids=lambda fault: fault.name)
def test_a_fault_changes_the_run_from_its_onset_on_and_nothing_before(
    observed: RunConfig, tmp_path: Path, fault: Fault
) -> None:
    dose = dose_of(fault, magnitude=30.0) if fault.unit == "bit" else dose_of(fault)
    config = fault.configure(observed, dose)
    clean, _ = losses_with(config, tmp_path / "clean", lambda bench: bench)
    faulty, _ = losses_with(config, tmp_path / "faulty", lambda bench: fault.arm(bench, dose))
    assert faulty[:ONSET] == clean[:ONSET]
    assert faulty[ONSET:] != clean[ONSET:]


def test_a_clean_run_armed_with_nothing_is_the_run(observed: RunConfig, tmp_path: Path) -> None:
    one, _ = losses_with(observed, tmp_path / "one", lambda bench: bench)
    other, _ = losses_with(observed, tmp_path / "other", lambda bench: skip_healthy(bench, ()))
    assert one == other


# The data


def spoiled(loader: Loader, name: str, share: float = 1.0) -> tuple[Batch, Batch]:
    spoil = getattr(data_faults, name)
    dose = Dose(onset=ONSET, length=2, magnitude=2.0, share=share, seed=5)
    return loader.batch(ONSET), SpoiledLoader(loader, spoil, dose).batch(ONSET)


CONTENT = ("one_letter", "one_byte", "random_bytes", "same_rows")


@pytest.mark.parametrize("name", CONTENT)
@pytest.mark.parametrize("share", [1.0, 0.1])
def test_spoiled_tokens_keep_their_targets_in_line(loader: Loader, name: str, share: float) -> None:
    plain, bad = spoiled(loader, name, share)
    inside = bad.targets_BT[:, :-1] != IGNORE
    assert (bad.targets_BT[:, :-1] == bad.tokens_BT[:, 1:])[inside].all()
    assert ((bad.targets_BT == IGNORE) == (plain.targets_BT == IGNORE)).all()
    assert share < 1.0 or not np.array_equal(bad.tokens_BT, plain.tokens_BT)


@pytest.mark.parametrize("name", [*CONTENT, "shifted_targets", "leaked_targets"])
def test_samples_documents_and_digest_of_a_spoiled_batch_are_as_they_were(loader: Loader, name: str) -> None:
    plain, bad = spoiled(loader, name)
    assert bad.digest == plain.digest
    assert np.array_equal(bad.samples_B3, plain.samples_B3)
    assert np.array_equal(bad.documents_BT, plain.documents_BT)
    assert bad.num_targets == np.count_nonzero(bad.targets_BT != IGNORE)


def test_the_share_of_spoiled_tokens_is_the_dose(loader: Loader) -> None:
    plain = loader.batch(ONSET)
    for share in (1.0, 0.1, 0.01, 0.001):
        marked = mark(plain, Dose(onset=ONSET, length=1, magnitude=0.0, share=share, seed=1))
        assert marked.sum() == max(1, round(share * plain.tokens_BT.size))


def test_a_data_fault_comes_again_at_replay_and_not_after_its_window(loader: Loader) -> None:
    dose = Dose(onset=ONSET, length=2, magnitude=0.0, seed=1)
    bad = SpoiledLoader(loader, data_faults.random_bytes, dose)
    assert np.array_equal(bad.batch(ONSET).tokens_BT, bad.batch(ONSET).tokens_BT)
    for batch_index in (ONSET - 1, ONSET + 2):
        assert np.array_equal(bad.batch(batch_index).tokens_BT, loader.batch(batch_index).tokens_BT)


def test_what_is_excluded_stays_blank_in_a_spoiled_batch(loader: Loader) -> None:
    source, _, row = loader.sample_ids(ONSET)[0].tolist()
    exclusion = (Exclusion(document=loader.row_documents(source, row)[0].document),)
    bad = SpoiledLoader(loader, data_faults.one_letter, Dose(onset=ONSET, length=1, magnitude=0.0, seed=1))
    blank = loader.batch(ONSET, exclusion)
    batch = bad.batch(ONSET, exclusion)
    held = blank.documents_BT == BLANK
    assert held.any()
    assert np.array_equal(batch.tokens_BT[held], blank.tokens_BT[held])
    assert (batch.targets_BT[held] == IGNORE).all()


def test_a_leak_makes_each_input_its_own_target(loader: Loader) -> None:
    _, bad = spoiled(loader, "leaked_targets")
    held = bad.targets_BT != IGNORE
    assert (bad.tokens_BT == bad.targets_BT)[held].all()


def test_shifted_labels_are_the_tokens_after_the_next(loader: Loader) -> None:
    plain, bad = spoiled(loader, "shifted_targets")
    moved = bad.targets_BT != plain.targets_BT
    assert moved.mean() > 0.5
    assert (bad.targets_BT[:, :-1] == plain.targets_BT[:, 1:])[moved[:, :-1]].all()


def test_a_duplicated_shard_holds_so_many_rows_under_new_ids(loader: Loader) -> None:
    dose = Dose(onset=ONSET, length=3, magnitude=2.0, seed=1)
    bad = SpoiledLoader(loader, data_faults.same_rows, dose)
    rows = {row.tobytes() for index in dose.window for row in bad.batch(index).tokens_BT}
    assert len(rows) == 2
    assert bad.batch(ONSET).digest != bad.batch(ONSET + 1).digest


def test_a_mixture_jump_reads_rows_of_one_domain_only(loader: Loader) -> None:
    dose = Dose(onset=ONSET, length=3, magnitude=0.0, seed=1)
    bad, plain = data_faults.JumpedLoader(loader, dose).batch(ONSET), loader.batch(ONSET)
    own = plain.samples_B3[:, 0] == 1
    assert not own.all()
    assert (bad.samples_B3[:, 0] == 1).all()
    assert np.array_equal(bad.tokens_BT[own], plain.tokens_BT[own])
    text = np.asarray(loader.splits[1].tokens).astype(np.int64).tobytes()
    assert all(row.tobytes() in text for row in bad.tokens_BT)
    after = data_faults.JumpedLoader(loader, dose).batch(ONSET + 3)
    assert np.array_equal(after.tokens_BT, loader.batch(ONSET + 3).tokens_BT)


# The step


def test_a_transient_fault_fires_once_and_not_at_a_second_pass(observed: RunConfig, tmp_path: Path) -> None:
    with opened(observed, tmp_path / "run") as run:
        fault = FAULTS["gradient_times_1000"]
        dose = dose_of(fault, onset=0)
        bench = fault.arm(Bench(run.setup, run.state, run.data), dose)
        run.state.batch_index = 1
        norms = []
        for _ in range(2):
            run.state.optimizer.zero_grad()
            batch = run.data.loader.batch(0)
            bench.setup.forward_backward(split(batch, bench.setup), batch.num_targets)
            norms.append(max(float(p.grad.norm()) for p in run.state.parameters.values() if p.grad is not None))
    assert norms[0] > 20 * norms[1]


def test_an_update_applied_twice_is_counted_by_the_optimiser_alone(observed: RunConfig, tmp_path: Path) -> None:
    fault = FAULTS["update_twice"]
    _, count = losses_with(observed, tmp_path / "run", lambda bench: fault.arm(bench, dose_of(fault)))
    assert count == STEPS + 1


def note_rates(bench: Bench, rates: list[float]) -> None:
    """Keep the rate that every update reaches the kernel with."""
    for rule in bench.state.optimizer.rules:
        assert isinstance(rule, FusedAdam)
        rule.kernel.register_step_pre_hook(lambda o, a, k: rates.append(o.param_groups[0]["lr"]))


def test_a_rate_times_ten_lasts_its_steps(observed: RunConfig, tmp_path: Path) -> None:
    fault, seen = FAULTS["rate_times_10"], []

    def arm(bench: Bench) -> Bench:
        armed = fault.arm(bench, dose_of(fault))
        note_rates(bench, seen)
        return armed

    plain: list[float] = []
    losses_with(observed, tmp_path / "faulty", arm)

    def watch(bench: Bench) -> Bench:
        note_rates(bench, plain)
        return bench

    losses_with(observed, tmp_path / "clean", watch)
    factors = [a / b for a, b in zip(seen, plain, strict=True)]
    assert factors == pytest.approx([10.0 if step in (ONSET, ONSET + 1) else 1.0 for step in range(STEPS)])


def test_a_flipped_bit_flips_back(observed: RunConfig) -> None:
    tensor = torch.randn(4, 5)
    before = tensor.clone()
    dose = Dose(onset=0, length=1, magnitude=30.0, seed=2)
    flip_bit(tensor, dose)
    assert (tensor != before).sum() == 1
    flip_bit(tensor, dose)
    assert torch.equal(tensor, before)


def test_an_overflow_comes_with_its_rows_below_fp32_and_with_no_others(observed: RunConfig, tmp_path: Path) -> None:
    fault = FAULTS["inf_loss"]
    config = fault.configure(observed, dose_of(fault))
    assert config.parallel.precision == "bf16"
    losses, _ = losses_with(config, tmp_path / "bf16", lambda bench: fault.arm(bench, dose_of(fault)))
    assert math.isinf(losses[ONSET])
    losses, _ = losses_with(observed, tmp_path / "fp32", lambda bench: fault.arm(bench, dose_of(fault)))
    assert all(map(math.isfinite, losses))


def test_a_lost_step_count_is_zero_and_moments_are_kept(observed: RunConfig, tmp_path: Path) -> None:
    with opened(observed, tmp_path / "run") as run:
        train(run.state, run.setup, run.data, run.keeping, stop=StopRequest())
        before = {name: tensor.clone() for name, tensor in run.state.tensors().items()}
        forget_step_count(Bench(run.setup, run.state, run.data))
        assert int(run.state.optimizer.step_count()) == 0
        assert all(torch.equal(before[name], tensor) for name, tensor in run.state.tensors().items())


def test_a_control_consumes_its_batches_without_an_update(observed: RunConfig, tmp_path: Path) -> None:
    losses, count = losses_with(observed, tmp_path / "run", lambda bench: skip_healthy(bench, (4, 5)))
    assert len(losses) == STEPS + 2
    assert count == STEPS


# The catalogue


def test_doses_depend_on_the_seed_alone_and_stay_in_their_ranges() -> None:
    for fault in CATALOGUE:
        doses = [fault.dose(seed, 200) for seed in range(20)]
        assert doses == [fault.dose(seed, 200) for seed in range(20)]
        for dose in doses:
            if fault.throughout:
                assert (dose.onset, dose.length) == (0, 200)
            else:
                assert 80 <= dose.onset <= 110
                assert fault.length[0] <= dose.length <= fault.length[1]
            assert fault.magnitude[0] <= dose.magnitude <= fault.magnitude[1] * (1 + 1e-12)
        assert len({dose.seed for dose in doses}) == 20


def test_settings_that_are_faults_change_the_config_and_nothing_else_does(observed: RunConfig) -> None:
    for fault in CATALOGUE:
        changed = fault.configure(observed, fault.dose(0, STEPS)) != observed
        assert changed == (fault.throughout or fault.name == "inf_loss")
        assert fault.throughout or fault.at_resume or fault.arm is not Fault.arm
