"""The guard inside the Trainer of Hugging Face transformers."""

from collections.abc import Mapping
from functools import wraps
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from surefoot.config.guard import GuardConfig
from surefoot.interop.trainers import GuardHalted, LoopGuard, Restore

NAME = "surefoot_guard"
"""Where a Trainer's state keeps the guard's memory."""


def guard_trainer(
    trainer: Any, config: GuardConfig | None = None, *, folder: str | Path | None = None, restore: Restore | None = None
) -> Any:
    """Put the guard into a transformers Trainer, before ``trainer.train()``, and return the TrainerCallback that was added to it.

    A refused update loses its gradients before the optimiser steps, and the learning-rate scheduler stays where it was; the Trainer's own
    ``global_step`` counts it all the same. The guard's memory is saved with every checkpoint and comes back with it. When the guard halts,
    training stops with its diagnosis in the log and in ``callback.halted``. Raises ImportError without transformers, ValueError under fp16 or DeepSpeed.
    """
    try:
        from transformers import TrainerCallback
    except ImportError as error:
        raise ImportError(
            "the guard in a transformers Trainer needs transformers and accelerate: pip install 'surefoot[trainers]'"
        ) from error

    if trainer.args.fp16:
        raise ValueError(
            "fp16=True: its loss scaler already skips updates, by rules of its own; use bf16=True, which needs no loss scale"
        )
    if getattr(trainer, "is_deepspeed_enabled", False):
        raise ValueError(
            "DeepSpeed steps inside its own engine, where no callback can drop the gradients; use FSDP or DDP"
        )

    class GuardCallback(_Guarding, TrainerCallback):  # type: ignore[misc]
        """The guard's calls at the right moments."""

    callback = GuardCallback(LoopGuard(config, folder=folder, restore=restore))
    callback.watch(trainer)
    trainer.add_callback(callback)
    return callback


class _Guarding:
    """What the callback does; transformers is not needed to define it."""

    def __init__(self, guard: LoopGuard) -> None:
        self.guard = guard
        self.halted = ""
        """The diagnosis, once the guard has given up."""
        self._losses: list[float] = []
        self._summed = False
        self._norm: float | None = None
        self._scheduler_before: dict[str, Any] | None = None

    def watch(self, trainer: Any) -> None:
        """Hear the loss of every micro-batch and the gradient norm before it is clipped: the Trainer's events carry neither."""
        trainer.model.register_forward_hook(self._hear_loss, with_kwargs=True)
        clip = trainer.accelerator.clip_grad_norm_

        @wraps(clip)
        def clip_and_tell(*args: Any, **kwargs: Any) -> Any:
            norm = clip(*args, **kwargs)
            self._norm = float(norm)
            return norm

        trainer.accelerator.clip_grad_norm_ = clip_and_tell

    def _hear_loss(self, model: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        loss = output.get("loss") if isinstance(output, Mapping) else None
        if model.training and isinstance(loss, Tensor):
            self._losses.append(float(loss.detach()))
            # Where the Trainer hands out the number of targets, losses are shares of the whole batch's.
            self._summed = kwargs.get("num_items_in_batch") is not None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """A resumed training brings back what the guard remembered."""
        if state.global_step > 0 and NAME in state.stateful_callbacks:
            self.guard.load_state_dict(state.stateful_callbacks[NAME])
        return control

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Judge the update; a refused one has no gradients left, and an optimiser passes over a parameter without one."""
        if not self._losses or self._norm is None:
            missing = (
                "no loss came with the model's output" if not self._losses else "accelerate clipped no gradient norm"
            )
            raise ValueError(f"{missing}, and the guard judges by both; use LoopGuard in a loop of your own")
        loss = sum(self._losses) / (1 if self._summed else len(self._losses))
        if self._summed and getattr(args, "average_tokens_across_devices", False):
            # Then they are shares of all ranks' targets, and the guard averages over ranks once more.
            loss *= max(1, args.world_size)
        lr = float(kwargs["optimizer"].param_groups[0]["lr"])
        norm, self._norm = self._norm, None
        self._losses.clear()
        try:
            allowed = self.guard.allows(loss, norm, lr=lr)
        except GuardHalted as halt:
            allowed, self.halted = False, str(halt)
            control.should_training_stop = True
        if not allowed:
            for parameter in kwargs["model"].parameters():
                parameter.grad = None
            if kwargs.get("lr_scheduler") is not None:
                self._scheduler_before = dict(kwargs["lr_scheduler"].state_dict())
        return control

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """After a refused update the scheduler goes back to where it was."""
        if self._scheduler_before is not None:
            scheduler = kwargs["lr_scheduler"]
            scheduler.load_state_dict(self._scheduler_before)
            for group, rate in zip(kwargs["optimizer"].param_groups, scheduler.get_last_lr(), strict=True):
                group["lr"] = rate
            self._scheduler_before = None
        # Part of trainer_state.json, should this step be saved.
        state.stateful_callbacks[NAME] = self.guard.state_dict()
        return control

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Mapping[str, float], **kwargs: Any) -> Any:
        """Held-out losses are judged too."""
        losses = {
            name.removeprefix("eval_").removesuffix("_loss"): v for name, v in metrics.items() if name.endswith("_loss")
        }
        if losses:
            self.guard.evaluated(losses)
        return control

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """The ledger file is let go of."""
        self.guard.close()
        return control
