"""What a fork takes over of its parent's state: moments of the same kind, in whatever dtype; other moments start at zero, and so does their count."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from surefoot.config.model import ModelConfig
from surefoot.config.optim import AdaGC, AdamW, Constant, Lion, Muon, StableAdamW, ZClip
from surefoot.config.run import RunConfig
from surefoot.guard.ledger import Checkpoint
from surefoot.guard.updates import Updates
from surefoot.monitor.run import Run
from surefoot.parallel.digest import digest_tensors
from surefoot.parallel.fork_launch import run_ranks
from surefoot.parallel.mesh import join_world
from surefoot.proof.rehearsal import Script, rehearsal, rehearse
from surefoot.train.checkpoint import load
from surefoot.train.keeping import Keeping
from surefoot.train.manifest import CheckpointError
from surefoot.train.run import ForkOf, OpenRun, open_run
from surefoot.train.setup import set_up
from tolerances import FORK_FIRST_UPDATE, FORK_ROUNDED

AT = 10
OPTIMIZERS = {"adamw": AdamW(), "lion": Lion(), "muon": Muon(), "stable_adamw": StableAdamW()}
Vary = Callable[..., RunConfig]


def ignore(kind: str, row: Mapping[str, Any]) -> None:
    return None


def moved_by(config: RunConfig, optimizer: Any, **settings: Any) -> RunConfig:
    """The config with a constant rate that suits the optimiser."""
    lr = 5e-4 if isinstance(optimizer, Lion) else 3e-3
    return replace(config, optim=replace(config.optim, optimizer=optimizer, lr=lr, schedule=Constant(), **settings))


@pytest.fixture(scope="module")
def parents(
    corpus: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[RunConfig, Path]]:
    """(config, folder) of a run of 10 steps by kind of optimiser, run once."""
    base = replace(rehearsal(*corpus, steps=AT), guard=replace(rehearsal(*corpus).guard, snapshots=0))
    there: dict[tuple[str, str, Any], tuple[RunConfig, Path]] = {}

    def parent(kind: str, precision: str = "fp32", clipping: Any = None) -> tuple[RunConfig, Path]:
        key = (kind, precision, clipping)
        if key not in there:
            config = moved_by(base, OPTIMIZERS[kind], **({"clipping": clipping} if clipping else {}))
            config = replace(config, parallel=replace(config.parallel, precision=precision))  # type: ignore[arg-type]
            there[key] = config, tmp_path_factory.mktemp("parent") / "run"
            rehearse(*there[key])
        return there[key]

    return parent


def checkpoint_of(parent: Path) -> Checkpoint:
    return next(c for c in Run(parent).ledger.surviving_checkpoints() if c.step == AT)


@contextmanager
def forked(config: RunConfig, folder: Path, parent: Path) -> Iterator[OpenRun]:
    """A fork of the parent's last checkpoint, just begun."""
    fork = ForkOf(parent=Run(parent), checkpoint=checkpoint_of(parent), changes=(("optim.lr", "1", "2"),))
    with open_run(config, folder, join_world(config.parallel), notify=ignore, fork=fork, peak=0.0) as run:
        yield run


def saved(config: RunConfig, parent: Path) -> dict[str, torch.Tensor]:
    """What the parent's last checkpoint holds."""
    _, state = set_up(config, join_world(config.parallel))
    load(parent / "checkpoints" / checkpoint_of(parent).name, state.tensors())
    return state.tensors()


def goes_on_to(config: RunConfig, folder: Path) -> list[dict[str, Any]]:
    """Run a fork that has begun to its end: its rows. The guard found nothing, and all was done."""
    ended = rehearse(config, folder)
    assert (ended.reason, ended.step) == ("done", config.steps)
    run = Run(folder)
    assert not run.ledger.of_kind("verdict")
    assert not run.ledger.of_kind("finding")
    return list(run.rows)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("lion", AdamW(), "20 parameters: the optimiser changed from lion to adamw"),
        (
            "muon",
            AdamW(beta2=0.999),
            "20 parameters: the optimiser changed from muon to adamw, and its rule counts updates for all it moves",
        ),
        ("adamw", StableAdamW(), "20 parameters: the optimiser changed from adamw to stable_adamw"),
    ],
)
def test_the_first_update_of_another_optimiser_is_its_own_first(
    parents: Callable[..., tuple[RunConfig, Path]], tmp_path: Path, before: str, after: Any, said: str
) -> None:
    config, parent = parents(before)
    config = replace(moved_by(config, after), steps=AT + 6)
    with forked(config, tmp_path / "fork", parent) as run:
        assert f"; moments start at zero for {said}" in run.opening
        assert all(not tensor.any() for tensor in run.state.optimizer.tensors().values())
        assert [float(rule.step_count()) for rule in run.state.optimizer.rules] == [0.0]
        assert float(run.state.optimizer.step_count()) == run.state.step == AT
        assert run.state.guard.detectors.updates == Updates()
        for tensor in run.state.optimizer.tensors().values():
            tensor.fill_(1.0)
        run.keeping.load_shared(parent / "checkpoints" / checkpoint_of(parent).name, run.state)
        assert all(not tensor.any() for tensor in run.state.optimizer.tensors().values())
    rows = goes_on_to(config, tmp_path / "fork")
    # of Adam's kind the first moves every weight that has a gradient by the rate, up to decay
    assert rows[0]["train/update_size"] == pytest.approx(config.optim.lr, rel=FORK_FIRST_UPDATE)


def test_what_muon_and_its_others_share_with_the_parent_is_kept(
    parents: Callable[..., tuple[RunConfig, Path]], tmp_path: Path
) -> None:
    config, parent = parents("adamw")
    config = replace(moved_by(config, Muon()), steps=AT + 6)
    before = saved(parents("adamw")[0], parent)
    with forked(config, tmp_path / "fork", parent) as run:
        assert "zero for 14 parameters: the optimiser changed from adamw to muon" in run.opening
        counts = {rule.kind: float(rule.step_count()) for rule in run.state.optimizer.rules}
        assert counts == {"adamw": AT, "muon": AT}
        for name, tensor in run.state.optimizer.tensors().items():
            assert not tensor.any() if name.startswith("momentum/") else torch.equal(tensor, before[name])
    goes_on_to(config, tmp_path / "fork")


@pytest.mark.parametrize("kind", ["adamw", "lion"])
def test_a_deeper_fork_starts_moments_where_one_count_would_not_fit(
    parents: Callable[..., tuple[RunConfig, Path]], tmp_path: Path, kind: str
) -> None:
    config, parent = parents(kind)
    before = saved(config, parent)
    deeper: ModelConfig = replace(config.model, num_layers=3)
    config = replace(config, model=deeper, steps=AT + 6)
    with forked(config, tmp_path / "fork", parent) as run:
        state = run.state
        assert "; drawn anew: blocks.2." in run.opening
        number = 29 if kind == "adamw" else 9
        assert f"moments start at zero for {number} parameters: some are drawn anew" in run.opening
        kept = [name for name, tensor in state.optimizer.tensors().items() if tensor.any()]
        assert all(torch.equal(state.tensors()[name], before[name]) for name in kept)
        assert len(kept) == (0 if kind == "adamw" else 20)
        assert float(state.optimizer.rules[0].step_count()) == (0.0 if kind == "adamw" else AT)
    rows = goes_on_to(config, tmp_path / "fork")
    if kind == "adamw":
        assert rows[0]["train/update_size"] == pytest.approx(config.optim.lr, rel=FORK_FIRST_UPDATE)


def test_a_fork_with_another_optimiser_is_resumed_and_rolled_back_to_the_same_bits(
    parents: Callable[..., tuple[RunConfig, Path]], tmp_path: Path
) -> None:
    config, parent = parents("lion")
    config = replace(moved_by(config, AdamW()), steps=AT + 12)
    config = replace(config, checkpoint=replace(config.checkpoint, every=4))
    scripts = {
        "whole": [Script()],
        "resumed": [Script(stop_after=AT + 2), Script(stop_after=AT + 7), Script()],
        "crashed": [Script(die_after=AT + 6), Script()],
        "to its beginning": [Script(rollback_after=AT + 3, rollback_to=AT + 1)],
        "to its own checkpoint": [Script(rollback_after=AT + 9, rollback_to=AT + 8)],
    }
    ends = {}
    for name, parts in scripts.items():
        folder = tmp_path / name
        with forked(config, folder, parent):
            pass
        for part in parts:
            try:
                ended = rehearse(config, folder, part)
            except Exception:  # noqa: BLE001  (the script's crash)
                assert part.die_after >= 0
        assert (ended.reason, ended.step) == ("done", config.steps), name
        ends[name] = ended.digests
    assert all(digests == ends["whole"] for digests in ends.values()), ends.keys()
    restored = {n: [a.checkpoint for a in Run(tmp_path / n).attempts if a.reason == "rollback"] for n in scripts}
    assert restored["to its beginning"][0].startswith("fork-")
    assert restored["to its own checkpoint"] == [f"step-0000{AT + 2}-attempt-0002"]


def test_a_fork_of_a_fork_knows_when_its_moments_began(
    parents: Callable[..., tuple[RunConfig, Path]], tmp_path: Path
) -> None:
    config, parent = parents("lion")
    config = replace(moved_by(config, AdamW()), steps=AT + 6)
    with forked(config, tmp_path / "fork", parent):
        pass
    whole = rehearse(config, tmp_path / "fork", Script(stop_after=AT + 3))
    assert whole.step == AT + 4
    run = Run(tmp_path / "fork")
    last = run.ledger.surviving_checkpoints()[-1]
    again = ForkOf(parent=run, checkpoint=last, changes=())
    with open_run(
        config, tmp_path / "again", join_world(config.parallel), notify=ignore, fork=again, peak=0.0
    ) as opened:
        assert "moments start at zero" not in opened.opening
        assert opened.state.counters()["moments_since"] == {"adamw": AT}
        assert float(opened.state.optimizer.rules[0].step_count()) == 4.0
    forks_end = rehearse(config, tmp_path / "again").digests
    assert forks_end == rehearse(config, tmp_path / "fork").digests


@pytest.mark.parametrize(
    ("precision", "change", "said"),
    [
        ("fp32", {"moments": "bf16"}, "; moments taken from float32 to bfloat16, to the nearest"),
        ("fp32", {"precision": "bf16_pure"}, "; weights taken from float32 to bfloat16, to the nearest"),
        ("bf16_pure", {"precision": "fp32"}, "; weights taken from bfloat16 to float32"),
    ],
)
def test_a_fork_takes_its_parents_state_in_another_dtype(
    parents: Callable[..., tuple[RunConfig, Path]], tmp_path: Path, precision: str, change: dict[str, Any], said: str
) -> None:
    config, parent = parents("adamw", precision)
    before = saved(config, parent)
    if "moments" in change:
        config = replace(config, optim=replace(config.optim, **change))
    else:
        config = replace(config, parallel=replace(config.parallel, **change))
    config = replace(config, steps=AT + 6)
    with forked(config, tmp_path / "fork", parent) as run:
        assert run.opening.endswith(said)
        assert float(run.state.optimizer.rules[0].step_count()) == AT
        differ = 0
        for name, tensor in run.state.tensors().items():
            assert torch.equal(tensor, before[name].to(tensor.dtype)), name
            differ += tensor.dtype != before[name].dtype
        assert differ
    goes_on_to(config, tmp_path / "fork")


def test_adams_means_are_the_same_under_other_betas(
    parents: Callable[..., tuple[RunConfig, Path]], tmp_path: Path
) -> None:
    config, parent = parents("adamw")
    roots = {}
    for name, kind in (("same", AdamW()), ("other", AdamW(beta1=0.8, beta2=0.999))):
        with forked(replace(moved_by(config, kind), steps=AT + 6), tmp_path / name, parent) as run:
            assert ("their means kept" in run.opening) == (name == "other")
            rule = run.state.optimizer.rules[0]
            means = {k: t / (1 - kind.beta1**AT) for k, t in rule.tensors().items() if k.startswith("exp_avg/")}
            roots[name] = [*(rule.second_moments(list(rule.parameters)) or []), *means.values()]
    for same, other in zip(roots["same"], roots["other"], strict=True):
        torch.testing.assert_close(other, same, rtol=FORK_ROUNDED, atol=0.0)
    assert any(not torch.equal(a, b) for a, b in zip(roots["same"], roots["other"], strict=True))


def test_what_another_clipping_remembers_is_not_taken(
    parents: Callable[..., tuple[RunConfig, Path]], tmp_path: Path
) -> None:
    config, parent = parents("adamw", clipping=AdaGC(warmup_steps=5))
    assert saved(config, parent)["clip/steps"] == AT
    config = replace(config, steps=AT + 6, optim=replace(config.optim, clipping=ZClip(warmup_steps=5)))
    with forked(config, tmp_path / "fork", parent) as run:
        assert all(not tensor.any() for tensor in run.state.clipping.tensors().values())
        assert float(run.state.optimizer.rules[0].step_count()) == AT


def test_a_fork_that_is_refused_has_begun_nothing(
    parents: Callable[..., tuple[RunConfig, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, parent = parents("adamw")
    config = replace(config, steps=AT + 6)

    def refuses(*_: object) -> None:
        raise CheckpointError("it does not fit")

    with monkeypatch.context() as patch:
        patch.setattr(Keeping, "load_shared", refuses)
        with pytest.raises(CheckpointError, match="it does not fit"), forked(config, tmp_path / "fork", parent):
            pass
    assert not (tmp_path / "fork").exists()
    with forked(config, tmp_path / "fork", parent):
        pass
    assert [row["kind"] for row in Run(tmp_path / "fork").ledger.rows] == ["lineage", "attempt", "checkpoint"]


def test_a_copy_that_an_earlier_command_left_is_not_taken_for_the_parents(
    parents: Callable[..., tuple[RunConfig, Path]], tmp_path: Path
) -> None:
    config, parent = parents("adamw")
    left = tmp_path / "fork" / "checkpoints" / f"fork-{checkpoint_of(parent).name}"
    left.mkdir(parents=True)
    (left / "manifest.json").write_text("{}")
    config = replace(config, steps=AT + 6)
    with forked(config, tmp_path / "fork", parent) as run:
        began = run.state.tensors()["weights/embedding.weight"].clone()
    with open_run(config, tmp_path / "fork", join_world(config.parallel), notify=ignore, peak=0.0) as run:
        assert torch.equal(run.state.tensors()["weights/embedding.weight"], began)


def test_every_kind_of_rule_has_a_name_of_its_own(
    parents: Callable[..., tuple[RunConfig, Path]],
) -> None:
    config, _ = parents("adamw")
    for others in (AdamW(), StableAdamW(), Lion()):
        _, state = set_up(moved_by(config, dataclasses.replace(Muon(), others=others)), join_world(config.parallel))
        assert set(state.optimizer.moments_since) == {"muon", others.kind}
        assert [rule.kind for rule in state.optimizer.rules] != ["muon", "muon"]


def begin_on_rank(rank: int, world: int, config: RunConfig, folder: Path, parent: Path) -> tuple[str, dict[str, int]]:
    """A fork begun on several ranks: what is said, and the digests of its state."""
    with forked(config, folder, parent) as run:
        return run.opening, digest_tensors(run.state.tensors())


def test_two_ranks_take_over_what_one_does(parents: Callable[..., tuple[RunConfig, Path]], tmp_path: Path) -> None:
    config, parent = parents("adamw")
    narrow = moved_by(config, replace(Muon(), others=AdamW(beta2=0.999)), moments="bf16")
    narrow = replace(narrow, steps=AT + 6)
    with forked(narrow, tmp_path / "one", parent) as run:
        alone = run.opening, digest_tensors(run.state.tensors())
    sharded = replace(narrow, parallel=replace(narrow.parallel, data_parallel="fsdp"))
    assert run_ranks(2, begin_on_rank, sharded, tmp_path / "two", parent) == [alone, alone]
