"""Micro-batches through the stages of a pipeline, in the order of a schedule of torch.distributed.pipelining."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from surefoot.config.layout_rules import fills_pipeline
from surefoot.config.parallel import ParallelConfig
from surefoot.model.loss import LossSums
from surefoot.parallel.forward_backward import MicroBatch, Rows, reshard
from surefoot.parallel.mesh import World
from surefoot.parallel.pipeline_stages import Stages, rank_of_stage
from surefoot.parallel.pipeline_tied import TiedCopy

SINGLE: dict[str, type[PipelineScheduleSingle]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
SEVERAL: dict[str, type[PipelineScheduleMulti]] = {
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}
KEPT_SCHEDULES = 3
"""Schedules that are kept, the last ones used: each holds buffers for all of its micro-batches. A run has one shape, a second one for the pieces
of a batch, and at times a third, when a ramp changes it."""


class Shape(NamedTuple):
    """What a schedule is made for."""

    micro_batches: int
    rows: int
    tokens: int
    """Of one row on this rank."""
    masked: bool


class PipelineForwardBackward:
    """Every stage takes what the one before it gives, builds its own mask and angles from documents and positions, and the last one the losses."""

    def __init__(self, stages: Stages, config: ParallelConfig, world: World, rows: Rows) -> None:
        assert world.tokens is not None
        self.stages, self.config, self.world, self.rows = stages, config, world, rows
        self.mesh = world.tokens["pp"]
        self.ranks: list[int] = self.mesh.mesh.tolist()
        self.tied = TiedCopy(stages, config, world) if stages.tied else None
        self.num_targets: float = 1.0
        self._schedules: dict[Shape, PipelineScheduleSingle | PipelineScheduleMulti] = {}
        self._sums: dict[int, LossSums] | None = None
        """Of each micro-batch by its number, while a schedule runs."""
        if stages.last is not None:
            stages.last.register_forward_hook(self._keep, with_kwargs=True)

    def __call__(self, micro_batches: Sequence[MicroBatch], num_targets: float) -> list[LossSums]:
        mine = [self.rows.mine(micro) for micro in micro_batches]
        schedule = self._schedule(mine)
        if self.tied is not None:
            self.tied.refresh()
        tokens, positions, documents, targets = (
            None if parts[0] is None else torch.cat(parts) for parts in zip(*mine, strict=True)
        )
        assert targets is not None
        self.num_targets, self._sums = num_targets, {}
        given: dict[str, Any] = {"positions_BT": positions, "documents_BT": documents, "targets_BT": targets}
        try:
            schedule.step(
                *([tokens] if self.stages.first is not None else []),
                # the last stage has its targets already
                target=targets[:, :1] if self.stages.last is not None else None,
                losses=[] if self.stages.last is not None else None,
                return_outputs=False,
                **given,
            )
            found = [self._sums[n] for n in range(len(mine))] if self.stages.last is not None else []
        except RuntimeError as error:
            # torch puts one of its own around what goes wrong in a stage
            raise (error.__cause__ or error) from None
        finally:
            self._sums = None
        if self.tied is not None:
            self.tied.reduce()
        return self._told(found, micro_batches)

    @torch.no_grad()
    def forward_only(self, micro_batches: Sequence[MicroBatch]) -> list[LossSums]:
        if self.tied is not None:
            self.tied.refresh()
        found = [sums for micro in micro_batches if (sums := self._through(self.rows.mine(micro))) is not None]
        for stage in self.stages.modules:
            reshard(stage)
        return self._told(found, micro_batches)

    def _through(self, micro: MicroBatch) -> LossSums | None:
        """One micro-batch through all stages; its sums where the last one is."""
        held, here = micro.tokens_BT, self.world.place.pp
        for number in range(self.stages.num_stages):
            if number not in self.stages.numbers:
                continue
            stage = self.stages.modules[self.stages.numbers.index(number)]
            if number > 0 and (before := rank_of_stage(number - 1, self.config)) != here:
                held = self._stream(micro.positions_BT)
                dist.recv(held, self._global(before), group=self.mesh.get_group())
            held = stage(held, *micro[1:])
            if number == self.stages.num_stages - 1:
                assert isinstance(held, LossSums)
                return held
            if (after := rank_of_stage(number + 1, self.config)) != here:
                dist.send(held.contiguous(), self._global(after), group=self.mesh.get_group())
        return None

    def _told(self, found: list[LossSums], micro_batches: Sequence[MicroBatch]) -> list[LossSums]:
        """The last stage's sums, of whole rows, on all ranks of the pipeline."""
        shapes = [micro.targets_BT.shape for micro in micro_batches]
        wide = torch.promote_types(self.stages.modules[0].compute_dtype, torch.float32)
        if self.stages.last is not None:
            whole = self.rows.whole(found)
            packed = torch.cat([part.reshape(-1).to(wide) for sums in whole for part in sums])
        else:
            size = sum(5 + shape.numel() for shape in shapes)
            packed = torch.empty(size, dtype=wide, device=self.world.device)
        source = rank_of_stage(self.stages.num_stages - 1, self.config)
        dist.broadcast(packed, self._global(source), group=self.mesh.get_group())
        told, start = [], 0
        for shape in shapes:
            objective, ce_sum, z_sum, lse_sum, lse_max = packed[start : start + 5].unbind()
            losses = packed[start + 5 : start + 5 + shape.numel()].view(shape)
            told.append(LossSums(objective, ce_sum, z_sum, lse_sum, lse_max, losses))
            start += 5 + shape.numel()
        return told

    def _schedule(self, mine: Sequence[MicroBatch]) -> PipelineScheduleSingle | PipelineScheduleMulti:
        """For micro-batches of these shapes: a stage keeps buffers of the first shapes that it sees."""
        rows, tokens = mine[0].tokens_BT.shape
        if any(micro.tokens_BT.shape != (rows, tokens) for micro in mine) or not fills_pipeline(self.config, len(mine)):
            sizes = [tuple(micro.tokens_BT.shape) for micro in mine]
            raise ValueError(
                f"parallel.pipeline.schedule={self.config.pipeline.schedule} over pp={self.config.pp} ranks cannot run micro-batches of {sizes}"
            )
        shape = Shape(len(mine), rows, tokens, mine[0].documents_BT is not None)
        schedule = self._schedules.pop(shape, None) or self._build(shape, mine[0])
        if len(self._schedules) >= KEPT_SCHEDULES:
            del self._schedules[next(iter(self._schedules))]
        self._schedules[shape] = schedule
        return schedule

    def _build(self, shape: Shape, micro: MicroBatch) -> PipelineScheduleSingle | PipelineScheduleMulti:
        last = self.stages.num_stages - 1
        stream = self._stream(micro.positions_BT).requires_grad_()
        runtimes = [
            PipelineStage(
                module,
                number,
                self.stages.num_stages,
                self.world.device,
                input_args=micro.tokens_BT if number == 0 else stream,
                output_args=self._objective() if number == last else stream,
                group=self.mesh.get_group(),
            )
            for module, number in zip(self.stages.modules, self.stages.numbers, strict=True)
        ]
        name = self.config.pipeline.schedule
        if name in SINGLE:
            return SINGLE[name](runtimes[0], shape.micro_batches, loss_fn=self._loss, scale_grads=False)
        return SEVERAL[name](list(runtimes), shape.micro_batches, loss_fn=self._loss, scale_grads=False)

    def _stream(self, positions_BT: Tensor) -> Tensor:
        """Room for the residual stream between two stages; tensor parallel ranks hold a piece of its tokens."""
        rows, tokens = positions_BT.shape
        model = self.stages.modules[0]
        shape = (rows, tokens // self.config.tp, model.cfg.d_model)
        return torch.empty(shape, dtype=model.compute_dtype, device=self.world.device)

    def _objective(self) -> Tensor:
        wide = torch.promote_types(self.stages.modules[0].compute_dtype, torch.float32)
        return torch.empty(1, dtype=wide, device=self.world.device, requires_grad=True)

    def _keep(self, module: nn.Module, args: tuple[Any, ...], given: dict[str, Any], out: LossSums) -> Tensor | None:
        """While a schedule runs: put the sums of a micro-batch aside and hand on what is minimised."""
        if self._sums is None:
            return None
        targets = given["targets_BT"]
        # without their graph, which would keep the stage's activations to the end of the step
        self._sums[targets.storage_offset() // targets.numel()] = LossSums(*(part.detach() for part in out))
        return out.objective.reshape(1)

    def _loss(self, objective: Tensor, target: Tensor) -> Tensor:
        return objective.sum() / self.num_targets

    def _global(self, rank: int) -> int:
        return self.ranks[rank]
