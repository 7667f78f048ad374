"""Every parameter with its setting, moved by the rule of its role: found by name, never by position."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor, nn

from surefoot.model.role_scaling import Role
from surefoot.optim.clip import local_part


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How one parameter moves, with everything multiplied out."""

    role: Role
    lr: float
    """Times the rate of the schedule."""
    weight_decay: float
    """A step takes lr (this parameter's) times this off the weight; under Adam it is the L2 penalty."""
    eps: float
    """0 where the rule has none."""
    rows: tuple[int, ...] = ()
    """Rows of each matrix where several are stacked along dim 0 (a fused projection); empty: one matrix, or a stack of them in three dims."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """What one step asks of every rule."""

    lr: float
    """Rate of the schedule."""
    scale: Tensor
    """Gradients are divided by it: clipping, and the scale of the loss. Scalar; rules get it and ``skip`` where their parameters lie."""
    skip: Tensor
    """Leave weights, moments and step counts untouched to the bit. Scalar bool."""
    gated: bool = True
    """The device may decide by ``skip``; else the host reads it and does nothing."""
    seed: int = 0
    """With ``batch_index`` and a parameter's name, the seed of every random draw of the update."""
    batch_index: int = 0


class Rule(Protocol):
    """One published update over some of the parameters. Moments exist (as zeros) before the first step."""

    kind: str
    """Of its config; no two rules of a run are of one kind."""
    parameters: dict[str, nn.Parameter]
    beta2: float
    """Decay of the second moment per step; NaN where there is none."""

    def tensors(self) -> dict[str, Tensor]:
        """What it remembers, ``<moment>/<parameter>``: the live tensors, of the parameter's placement."""

    def step_count(self) -> Tensor:
        """Applied updates by its own count, since its moments began; a scalar on the device."""

    def set_step_count(self, step: int) -> None:
        """Set that count."""

    def apply(self, update: Update) -> None:
        """One update from the gradients that are there, or none. A parameter without a gradient stays as it is. Collective where a
        rule needs whole matrices."""

    def last_updates(self, names: Sequence[str], lr: float) -> list[Tensor]:
        """What the last applied update, at rate ``lr`` of the schedule, added to these weights, decay included; local parts, recomputed
        from the moments and the weights that are there now. NaN before the first, and where a rule cannot know: after an update that
        was refused, or a restore. Collective like ``apply``."""

    def second_moments(self, names: Sequence[str]) -> list[Tensor] | None:
        """Roots of the bias-corrected second moments of these parameters, local parts; None where the rule has none."""


class Optimizer:
    """The rules of a run and the parameters they share out among themselves."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], settings: Mapping[str, Setting], rules: Sequence[Rule]
    ) -> None:
        self.parameters, self.settings, self.rules = dict(parameters), dict(settings), tuple(rules)
        self.rule_of = {name: rule for rule in self.rules for name in rule.parameters}
        """The rule that moves each parameter."""
        self.moments_since = {rule.kind: 0 for rule in self.rules}
        """Updates of the run before the moments of each kind of rule began, at zero: more than none in a fork that could not take them
        over. Bias correction counts from there."""

    def tensors(self) -> dict[str, Tensor]:
        """Moments of every parameter, ``exp_avg/<name>`` and the like: the live tensors, not copies."""
        return {key: tensor for rule in self.rules for key, tensor in rule.tensors().items()}

    def zero_grad(self) -> None:
        """Let go of all gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def step_count(self) -> Tensor:
        """Applied updates of the run by the optimiser's own count, a scalar on the device."""
        first = self.rules[0]
        return first.step_count() + self.moments_since[first.kind]

    def set_step_count(self, step: int) -> None:
        """Set the applied updates of the run, which every rule counts since its moments began."""
        for rule in self.rules:
            rule.set_step_count(max(step - self.moments_since[rule.kind], 0))

    def apply(self, update: Update) -> None:
        """One step of every rule with clipping folded in, or none at all.

        An update is never multiplied by zero, since 0 x NaN is NaN.
        """
        # masters in the host's memory are updated there
        home = local_part(next(iter(self.parameters.values()))).device
        update = replace(update, scale=update.scale.to(home), skip=update.skip.to(home))
        for rule in self.rules:
            rule.apply(update)
