"""The guard in the Trainer of transformers; skipped where accelerate, which that Trainer needs, is not installed."""

import json
import math
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from surefoot.config.guard import GuardConfig
from surefoot.interop.trainer_callback import NAME, guard_trainer
from surefoot.monitor.ledger_file import read_ledger

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

NUM = 48
NAN, SPIKE = 30, 40


class Rows(IterableDataset[dict[str, torch.Tensor]]):
    """Counting modulo 11 with noise, four rows a batch; batch NAN poisons the logits, batch SPIKE is of another language."""

    def __init__(self, *, bad: bool) -> None:
        self.bad = bad

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(5)
        for at in range(NUM):
            starts = torch.randint(11, (4, 1), generator=generator)
            rows = (starts + torch.arange(16)) % 11
            noisy = torch.rand(4, 16, generator=generator) < 0.1
            rows = torch.where(noisy, torch.randint(11, (4, 16), generator=generator), rows)
            if at == SPIKE:
                rows = 31 - rows
            if at in (NAN, SPIKE) and not self.bad:
                continue
            for row in rows:
                yield {"input_ids": row, "labels": row, "poison": torch.tensor(at == NAN)}


def tiny_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    class Poisoned(LlamaForCausalLM):
        """A model whose loss is NaN when its batch says so."""

        def forward(self, *args: Any, poison: torch.Tensor, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.loss = output.loss * torch.where(poison.any(), math.nan, 1.0)
            return output

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
    )
    return Poisoned(config)


def trainer_of(folder: Path, *, bad: bool, **settings: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    accumulated = settings.get("gradient_accumulation_steps", 1)
    arguments = {
        "output_dir": str(folder),
        "max_steps": (NUM if bad else NUM - 2),
        "per_device_train_batch_size": 4 // accumulated,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 45,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "remove_unused_columns": False,
    }
    return Trainer(model=tiny_model(), args=TrainingArguments(**(arguments | settings)), train_dataset=Rows(bad=bad))


@pytest.fixture(autouse=True)
def _their_warnings() -> Iterator[None]:
    """What transformers and accelerate warn about is not ours to fail on."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_guarded_trainer_ends_as_the_one_that_never_saw_the_bad_batches(tmp_path: Path, accumulated: int) -> None:
    """The warm-up ends at update 45, so a scheduler that moved on a skip would show in the weights."""
    guarded = trainer_of(tmp_path / "a", bad=True, gradient_accumulation_steps=accumulated)
    callback = guard_trainer(guarded, folder=tmp_path)
    guarded.train()
    clean = trainer_of(tmp_path / "b", bad=False, gradient_accumulation_steps=accumulated)
    clean.train()
    skips = [row["batch_index"] for row in read_ledger(tmp_path / "ledger.jsonl").rows if row["kind"] == "skip"]
    assert skips == [NAN, SPIKE]
    assert (callback.guard.step, callback.guard.batch_index) == (NUM - 2, NUM)
    for (name, ours), theirs in zip(guarded.model.named_parameters(), clean.model.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_a_guard_that_gives_up_stops_the_training(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, bad=True)
    callback = guard_trainer(trainer, GuardConfig(max_consecutive_skips=1))
    trainer.train()
    assert trainer.state.global_step == NAN + 1
    assert "skipped steps in a row" in callback.halted


def test_what_the_guard_remembers_is_saved_with_a_checkpoint_and_comes_back(tmp_path: Path) -> None:
    whole = trainer_of(tmp_path / "a", bad=True)
    uninterrupted = guard_trainer(whole)
    whole.train()
    first = trainer_of(tmp_path / "b", bad=True, save_strategy="steps", save_steps=34)
    guard_trainer(first)
    first.train()
    saved = json.loads((tmp_path / "b" / "checkpoint-34" / "trainer_state.json").read_text())
    assert saved["stateful_callbacks"][NAME]["step"] == 33
    second = trainer_of(tmp_path / "b", bad=True)
    resumed = guard_trainer(second)
    second.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-34"))
    assert resumed.guard.state == uninterrupted.guard.state
    assert resumed.guard.ledger.record == uninterrupted.guard.ledger.record


def test_fp16_is_refused_with_the_way_out(tmp_path: Path) -> None:
    class Args:
        fp16 = True

    class Half:
        args = Args()

    with pytest.raises(ValueError, match=r"fp16=True: its loss scaler already skips updates.*use bf16=True"):
        guard_trainer(Half())


def test_a_step_without_a_loss_or_a_norm_is_refused_aloud(tmp_path: Path) -> None:
    callback = guard_trainer(trainer_of(tmp_path, bad=False))
    with pytest.raises(ValueError, match="no loss came with the model's output, and the guard judges by both"):
        callback.on_pre_optimizer_step(None, None, None)
    model = torch.nn.Identity()
    callback._hear_loss(model, (), {}, {"loss": torch.tensor(3.0)})
    with pytest.raises(ValueError, match="accelerate clipped no gradient norm, and the guard judges by both"):
        callback.on_pre_optimizer_step(None, None, None)


@pytest.mark.parametrize(("handed_out", "loss"), [({"num_items_in_batch": 64}, 5.0), ({}, 2.5)])
def test_micro_batches_make_one_loss(tmp_path: Path, handed_out: dict[str, int], loss: float) -> None:
    """Where the Trainer hands out the number of targets each loss is a share of the whole; otherwise each is a mean of its own."""
    callback = guard_trainer(trainer_of(tmp_path, bad=False))
    seen = []

    class Recorder:
        def allows(self, loss: float, norm: float, lr: float) -> bool:
            seen.append((loss, norm, lr))
            return True

    callback.guard, callback._norm = Recorder(), 0.7
    for part in (2.0, 3.0):
        callback._hear_loss(torch.nn.Identity(), (), handed_out, {"loss": torch.tensor(part)})
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.25)
    callback.on_pre_optimizer_step(None, None, None, optimizer=optimizer)
    assert seen == [(loss, 0.7, 0.25)]


def test_without_transformers_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install 'surefoot\[trainers\]'"):
        guard_trainer(object())
