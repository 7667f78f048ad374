"""Checkpoints on one rank: what was saved comes back bit for bit, and what does not fit is refused by name."""

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from surefoot.parallel.digest import combine, digest_tensors
from surefoot.train.checkpoint import load, save, verify
from surefoot.train.manifest import CheckpointError, whole
from surefoot.train.staging import Staging

NAME = "step-000400-attempt-0001"


def state(seed: int = 0) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        "weights/embedding.weight": nn.Parameter(torch.randn(7, 5, generator=draw)),
        "weights/norm": torch.randn(5, generator=draw).bfloat16(),
        "exp_avg/norm": torch.randn(5, generator=draw, dtype=torch.float64),
        "transposed": torch.randn(3, 4, generator=draw).t(),
        "slice": torch.randn(10, generator=draw)[3:6],
        "scalar": torch.randn((), generator=draw),
        "counts": torch.randint(0, 1000, (4,), generator=draw),
        "flags": torch.tensor([True, False]),
        "none": torch.empty(0, 3),
        "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
    }


def emptied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.full_like(tensor, 1) for name, tensor in tensors.items()}


def digest(tensors: dict[str, Tensor]) -> str:
    return combine(digest_tensors(tensors))


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_state_of_every_dtype_comes_back_bit_for_bit(tmp_path: Path, asynchronous: bool) -> None:
    saved, record = state(), {"step": 400, "seeds": [1, 2], "guard": {"mean": 0.1, "name": "ä"}}
    manifest = save(tmp_path / NAME, saved, record, asynchronous=asynchronous).wait()
    found = emptied(saved)
    assert load(tmp_path / NAME, found) == record
    assert digest(found) == digest(saved)
    assert manifest.world_size == 1
    assert manifest.files.keys() | {"manifest.json"} == {path.name for path in (tmp_path / NAME).iterdir()}


def test_equal_states_give_equal_files(tmp_path: Path) -> None:
    first = save(tmp_path / "a" / NAME, state(), {"step": 1}).wait()
    second = save(tmp_path / "b" / NAME, state(), {"step": 1}).wait()
    other = save(tmp_path / "c" / NAME, state(seed=1), {"step": 1}).wait()
    assert first == second != other


def test_an_empty_state_is_a_checkpoint_too(tmp_path: Path) -> None:
    save(tmp_path / NAME, {}, {}).wait()
    assert load(tmp_path / NAME, {}) == {}


def test_loading_writes_into_the_tensors_themselves(tmp_path: Path) -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    save(tmp_path / NAME, model.state_dict(), {}).wait()
    places = [parameter.data_ptr() for parameter in other.parameters()]
    load(tmp_path / NAME, dict(other.named_parameters()))
    assert [parameter.data_ptr() for parameter in other.parameters()] == places
    assert digest(other.state_dict()) == digest(model.state_dict())
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in other.parameters())


def test_training_may_go_on_the_moment_save_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = threading.Event()
    saved = state()
    before = digest(saved)
    record: dict[str, Any] = {"exclusions": ["a"]}
    pending = save(tmp_path / NAME, saved, record, before_manifest=lambda: _wait(held))
    with torch.no_grad():
        for tensor in saved.values():
            tensor.zero_()
    record["exclusions"].append("b")
    assert not pending.done()
    assert not whole(tmp_path / NAME)
    held.set()
    pending.wait()
    assert pending.done()
    found = emptied(saved)
    assert load(tmp_path / NAME, found) == {"exclusions": ["a"]}
    assert digest(found) == before


def _wait(event: threading.Event) -> None:
    assert event.wait(30)


def test_staging_memory_is_reused_and_a_second_save_waits_for_the_first(tmp_path: Path) -> None:
    staging, held = Staging(), threading.Event()
    saved = state()
    first = save(tmp_path / "step-000001-attempt-0001", saved, {}, staging=staging, before_manifest=lambda: _wait(held))
    places = {name: buffer.data_ptr() for name, buffer in staging._buffers.items()}
    assert places.keys() == saved.keys()
    threading.Timer(0.05, held.set).start()
    second = save(tmp_path / "step-000002-attempt-0001", saved, {}, staging=staging)
    assert first.done()
    second.wait()
    assert {name: buffer.data_ptr() for name, buffer in staging._buffers.items()} == places
    larger = {**saved, "weights/norm": torch.zeros(9, dtype=torch.bfloat16)}
    save(tmp_path / "step-000003-attempt-0001", larger, {}, staging=staging).wait()
    found = emptied(larger)
    load(tmp_path / "step-000003-attempt-0001", found)
    assert digest(found) == digest(larger)


def test_the_manifest_comes_after_what_the_caller_must_flush_first(tmp_path: Path) -> None:
    seen: list[bool] = []
    save(tmp_path / NAME, state(), {}, before_manifest=lambda: seen.append(whole(tmp_path / NAME))).wait()
    assert seen == [False]
    assert whole(tmp_path / NAME)

    def full() -> None:
        raise OSError(28, "No space left on device", "attempts/0001/metrics.jsonl")

    pending = save(tmp_path / "step-000500-attempt-0001", state(), {}, before_manifest=full)
    with pytest.raises(CheckpointError, match=r"attempts/0001/metrics\.jsonl: no room"):
        pending.wait()
    assert not (tmp_path / "step-000500-attempt-0001").exists()


def test_pytorch_itself_can_read_the_files(tmp_path: Path) -> None:
    saved = state()
    save(tmp_path / NAME, saved, {}).wait()
    found = emptied(saved)
    with pytest.warns(UserWarning, match=r"torch\.distributed is disabled"):
        dcp.load(found, checkpoint_id=str(tmp_path / NAME))
    assert digest(found) == digest(saved)


def test_a_checkpoint_is_never_written_over_but_a_cut_short_one_is_replaced(tmp_path: Path) -> None:
    save(tmp_path / NAME, state(), {"run": 1}).wait()
    with pytest.raises(CheckpointError, match="a checkpoint of this name exists; checkpoints are never written over"):
        save(tmp_path / NAME, state(seed=1), {"run": 2}, asynchronous=False)
    assert load(tmp_path / NAME, emptied(state())) == {"run": 1}
    (tmp_path / NAME / "manifest.json").unlink()
    (tmp_path / NAME / "__7_0.distcp").write_bytes(b"from a run with more ranks")
    save(tmp_path / NAME, state(seed=1), {"run": 2}).wait()
    assert load(tmp_path / NAME, emptied(state())) == {"run": 2}
    assert not (tmp_path / NAME / "__7_0.distcp").exists()


def test_a_state_that_does_not_fit_is_refused_with_every_name_before_anything_changes(tmp_path: Path) -> None:
    save(tmp_path / NAME, {"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(4), "old": torch.ones(1)}, {}).wait()
    found = {"a": torch.zeros(2), "b": torch.zeros(3, 1), "c": torch.zeros(4).bfloat16(), "new": torch.zeros(1)}
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path / NAME, found)
    assert str(caught.value).splitlines()[1:] == [
        "  new: not in the checkpoint",
        "  old: in the checkpoint, but not in this state",
        "  b: shape [3] in the checkpoint, [3, 1] here",
        "  c: dtype torch.float32 in the checkpoint, torch.bfloat16 here",
    ]
    assert not any(tensor.any() for tensor in found.values())
    with pytest.raises(CheckpointError, match="a: on meta here; give it memory"):
        load(tmp_path / NAME, {**found, "a": torch.zeros(2, device="meta")})


def test_what_cannot_be_saved_is_refused_on_the_spot(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"w is torch\.strided on meta: a checkpoint takes dense tensors in memory"
    ):
        save(tmp_path / NAME, {"w": torch.empty(2, device="meta")}, {})
    with pytest.raises(TypeError, match="not JSON serializable"):
        save(tmp_path / NAME, {}, {"weights": torch.ones(1)})
    assert not (tmp_path / NAME).exists()


def test_a_checkpoint_can_be_moved_and_copied(tmp_path: Path) -> None:
    saved = state()
    save(tmp_path / "here" / NAME, saved, {"step": 1}).wait()
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    shutil.rmtree(tmp_path / "here")
    assert verify(tmp_path / "there" / NAME) == []
    found = emptied(saved)
    load(tmp_path / "there" / NAME, found)
    assert digest(found) == digest(saved)
    assert json.loads((tmp_path / "there" / NAME / "record.json").read_text()) == {"step": 1}
