"""The guard inside other people's loops; ``trainer_callback.py`` puts it into the Trainer of transformers.

It judges loss and gradient norm before the optimiser steps. What it can do there: say something, scale the gradient down, refuse the update,
ask for another rate, ask for an earlier state, halt. It takes no extra passes: the batch is yours.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Self

from torch import Tensor, nn

from surefoot.config.guard import GuardConfig
from surefoot.guard.actions import ClipHarder, Halt, LrEvent, Rollback, SkipUpdate
from surefoot.guard.detectors import accept_level
from surefoot.guard.guard import GuardState, Verdict, action_name, judge, judge_evaluation, limits
from surefoot.guard.ledger import Ledger
from surefoot.guard.limits import Limits
from surefoot.guard.signals import MISSING, EvalSignals, StepSignals
from surefoot.monitor.ledger_file import LedgerFile
from surefoot.monitor.sentences import sentence
from surefoot.optim.schedule import lr_factor
from surefoot.parallel.foreign import foreign_world
from surefoot.parallel.mesh import World
from surefoot.parallel.reduce import from_rank_zero, max_over_ranks, sum_over_ranks

_LOG = logging.getLogger("surefoot.guard")

Restore = Callable[[Rollback], Mapping[str, Any] | None]
"""Puts model, optimiser and data back to a state from at or before ``to_batch`` and returns the guard's ``state_dict`` that was saved with
it; None when there is none to go back to."""


class GuardHalted(RuntimeError):
    """The guard gave up; the text is its diagnosis."""


class LoopGuard:
    """The guard of a loop that is not ours, one call per update:

        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if guard.allows(loss, norm):
            optimizer.step()
        optimizer.zero_grad()

    Under torch.distributed every rank makes the same calls; numbers are reduced, so all ranks come to the same answer, and rank 0 writes.
    """

    def __init__(
        self,
        config: GuardConfig | None = None,
        *,
        folder: str | Path | None = None,
        parameters: Iterable[nn.Parameter] = (),
        max_norm: float = math.inf,
        restore: Restore | None = None,
        adjusts_rate: bool = False,
    ) -> None:
        """``folder``: where ledger.jsonl is kept; without one the ledger lives in ``state_dict``. ``parameters``: those whose gradients may be
        scaled down further when a norm stands out, after your own clipping to ``max_norm``; none means that the guard never clips.
        ``adjusts_rate``: your loop multiplies its learning rate by ``lr_factor``; otherwise the guard never orders another rate."""
        config = config or GuardConfig()
        self.config = replace(config, max_investigations=0, max_lr_events=config.max_lr_events if adjusts_rate else 0)
        self.state = GuardState()
        self.step = 0
        """Updates allowed."""
        self.batch_index = 0
        """Updates asked for: batches, if you accumulate no gradients."""
        self._parameters, self._max_norm, self._restore = tuple(parameters), max_norm, restore
        self._world = foreign_world()
        self._path = Path(folder) / "ledger.jsonl" if folder is not None and self._world.leads else None
        self._file = LedgerFile(self._path) if self._path else None
        if self._file and self._file.torn:
            _say(self._world, logging.WARNING, self._file.torn)
        rows = from_rank_zero(list(self._file.ledger.rows) if self._file else [], self._world)
        self._keeps_file = folder is not None
        self.ledger = Ledger(rows)
        self._opened = False

    @property
    def lr_factor(self) -> float:
        """What the guard's decisions multiply the scheduled rate of the next update by."""
        return lr_factor(self.step, self.ledger.lr_events)

    def allows(
        self,
        loss: float | Tensor,
        gradient_norm: float | Tensor,
        *,
        lr: float = MISSING,
        document_loss_max: float = MISSING,
        num_targets: int = 1,
        regime: int = 0,
    ) -> bool:
        """Whether the update may be applied; call it once per update, before ``optimizer.step()``, and do as it says.

        ``loss``: of this rank's part of the batch, nats per token; ``num_targets`` weighs it against the other ranks'. ``gradient_norm``:
        global, before any clipping. ``regime``: grows at a planned change of data or batch size. Raises GuardHalted.
        """
        self._open()
        loss, norm, largest, targets = self._reduced(
            _number(loss), _number(gradient_norm), document_loss_max, num_targets
        )
        bounds = limits(self.state, self.config, regime)
        allowed = targets > 0 and not _refused(bounds, loss, norm, largest)
        signals = StepSignals(
            batch_index=self.batch_index,
            step=self.step + allowed,
            loss=loss,
            gradient_norm=norm,
            num_targets=targets,
            applied=allowed,
            clipped_harder=allowed and self._clip(norm, bounds),
            lr=lr,
            document_loss_max=largest,
            regime=regime,
        )
        verdict = judge(self.state, signals, self.config, self.ledger.record)
        self.state, self.step, self.batch_index = verdict.state, signals.step, self.batch_index + 1
        return self._act(verdict, signals) and allowed

    def evaluated(self, losses: Mapping[str, float]) -> None:
        """Held-out losses by domain, nats per token: what stands out is said, nothing is done. The same on every rank."""
        self._open()
        verdict = judge_evaluation(self.state, EvalSignals(step=self.step, losses=tuple(losses.items())), self.config)
        self.state = verdict.state
        if verdict.findings:
            text = "; ".join(finding.text for finding in verdict.findings)
            self._tell(verdict, "proceed", text, max(0, self.batch_index - 1), logging.WARNING)

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values, to save with the weights they belong to."""
        place = {"guard": self.state.to_dict(), "step": self.step, "batch_index": self.batch_index}
        return place | ({} if self._keeps_file else {"ledger": [dict(row) for row in self.ledger.rows]})

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from a saved state. The ledger never goes back: of the one here and the one saved the longer counts."""
        self._rewind(saved)
        if not self._keeps_file and len(saved.get("ledger", ())) > len(self.ledger.rows):
            self.ledger = Ledger(saved["ledger"])
        self._opened = False

    def close(self) -> None:
        """Let go of the ledger file; the next batch opens it again."""
        if self._file:
            self._file.close()
            self._file, self._opened = None, False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _rewind(self, saved: Mapping[str, Any]) -> None:
        self.state = GuardState.from_dict(dict(saved["guard"]))
        self.step, self.batch_index = int(saved["step"]), int(saved["batch_index"])

    def _open(self) -> None:
        """An attempt begins with the first batch after a start or a resume."""
        if not self._opened:
            self._record("attempt", **self._attempt("resume" if self.ledger.attempt else "start"))
            self._opened = True

    def _attempt(self, reason: str, cause: str = "", checkpoint: str = "") -> dict[str, Any]:
        place = {"from_step": self.step, "from_batch": self.batch_index}
        number = self.ledger.attempt + 1
        return {"attempt": number, "reason": reason, "checkpoint": checkpoint, "exclude": [], "cause": cause, **place}

    def _reduced(self, loss: float, norm: float, largest: float, targets: int) -> tuple[float, float, float, int]:
        """The numbers of all ranks together: mean loss by targets, mean norm, largest document loss."""
        weighed = loss * targets if targets else 0.0
        total = sum_over_ranks([weighed, float(targets), norm], self._world).tolist()
        top = max_over_ranks([-math.inf if math.isnan(largest) else largest], self._world).tolist()[0]
        mean = total[0] / total[1] if total[1] else math.nan
        return mean, total[2] / self._world.size, MISSING if top == -math.inf else top, round(total[1])

    def _clip(self, norm: float, bounds: Limits) -> bool:
        """Scale the gradient down to the guard's own limit, where your clipping has left it above that."""
        left = min(norm, self._max_norm)
        if not self._parameters or left <= bounds.clip_norm:
            return False
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(bounds.clip_norm / left)
        return True

    def _act(self, verdict: Verdict, signals: StepSignals) -> bool:
        """Write down what the verdict says, then do it; False when weights are no longer those the gradient belongs to."""
        batch, action = signals.batch_index, verdict.action
        match action:
            case SkipUpdate(cause=cause):
                row = {"batch_index": batch, "step": self.step, "cause": cause, **_told(verdict)}
                self._record("skip", **row)
                _say(self._world, logging.WARNING, sentence("skip", row))
            case Rollback():
                return self._roll_back(verdict, action, batch)
            case LrEvent(cause=cause):
                self._tell(verdict, "lr_event", cause, batch, logging.WARNING)
                self._order_rate(action, batch, self.step)
            case Halt(reason=reason):
                self._tell(verdict, "halt", reason, batch, logging.ERROR)
                self._record("stop", reason=reason)
                raise GuardHalted(reason)
            case _ if verdict.findings or isinstance(action, ClipHarder):
                text = action.cause if isinstance(action, ClipHarder) else "; ".join(f.text for f in verdict.findings)
                grave = any(finding.severity != "note" for finding in verdict.findings)
                self._tell(verdict, action_name(action), text, batch, logging.WARNING if grave else logging.INFO)
        return True

    def _roll_back(self, verdict: Verdict, action: Rollback, batch: int) -> bool:
        """Ask for an earlier state. Without one the level of now is accepted, aloud, and the budget of rollbacks runs down all the same."""
        self._tell(
            verdict, "rollback", f"Rolling back: {action.cause}.", batch, logging.WARNING, to_batch=action.to_batch
        )
        saved = self._restore(action) if self._restore else None
        if action.lr_event is not None:
            # From the restored step on: the stretch that went wrong is what the lower rate is for.
            self._order_rate(action.lr_event, batch, int(saved["step"]) if saved else self.step)
        if saved is None:
            text = f"There is no state to go back to before batch {action.to_batch}: training goes on from where it is."
            self._tell(verdict, "proceed", text, batch, logging.WARNING)
            self.state = replace(self.state, detectors=accept_level(self.state.detectors))
            return True
        if saved["batch_index"] > action.to_batch:
            raise ValueError(
                f"restore gave back a state at batch {saved['batch_index']}, asked for was one at or before {action.to_batch}; "
                "return the state_dict that was saved with the restored weights, or None"
            )
        self._rewind(saved)
        row = self._attempt("rollback", action.cause, "what the loop restored")
        self._record("attempt", **row)
        _say(self._world, logging.WARNING, sentence("attempt", row))
        return False

    def _order_rate(self, event: LrEvent, batch: int, start_step: int) -> None:
        row = {"batch_index": batch, "start_step": start_step, **asdict(event)}
        self._record("lr_event", **row)
        _say(self._world, logging.WARNING, sentence("lr_event", row))

    def _tell(self, verdict: Verdict, action: str, text: str, batch: int, level: int, **more: Any) -> None:
        """A verdict as a row of the ledger and a line of the log."""
        told = _told(verdict)
        self._record("verdict", action=action, text=text, batch_index=batch, step=self.step, **told, **more)
        _say(self._world, level, text)

    def _record(self, kind: str, **fields: Any) -> None:
        if self._path and self._file is None:
            self._file = LedgerFile(self._path)
        if self._file:
            self._file.append(kind, **fields)
            self.ledger = self._file.ledger
        else:
            self.ledger = self.ledger.append(self.ledger.next_row(kind, fields, time.time()))


def _number(value: float | Tensor) -> float:
    return float(value.detach() if isinstance(value, Tensor) else value)


def _told(verdict: Verdict) -> dict[str, Any]:
    told: dict[str, Any] = {}
    if verdict.findings:
        told["findings"] = [finding.to_dict() for finding in verdict.findings]
    if verdict.diagnosis is not None:
        told["diagnosis"] = {"cause": verdict.diagnosis.cause, "text": verdict.diagnosis.text}
    return told


def _refused(bounds: Limits, loss: float, norm: float, largest: float) -> bool:
    """As the device decides in a run of ours: not finite, or beyond a limit; a document loss that is missing (NaN) is within."""
    broken = not (math.isfinite(loss) and math.isfinite(norm)) or largest == math.inf
    beyond = loss > bounds.loss or norm > bounds.gradient_norm or largest > bounds.document_loss
    return (broken and bounds.refuse_nonfinite) or beyond


def _say(world: World, level: int, text: str) -> None:
    if world.leads:
        _LOG.log(level, "%s", text)
