"""``surefoot train --dry-run --world N``: what each rank of a job would hold and send, without the job."""

import dataclasses
import json
from typing import TYPE_CHECKING

from surefoot.cli import exit_codes
from surefoot.config.layout_search import check_layout
from surefoot.config.run import RunConfig
from surefoot.monitor.wording import short

if TYPE_CHECKING:
    from surefoot.train.plan_layout import LayoutPlan
    from surefoot.train.plan_memory import Memory

GIB = 1024**3


def show_plan(config: RunConfig, ranks: int, *, as_json: bool) -> int:
    """Print the memory of the first and of the fullest rank, and bytes per collective of a step."""
    check_layout(config, ranks)  # before torch is imported
    from surefoot.train.plan_layout import plan_layout

    plan = plan_layout(config, ranks)
    if as_json:
        totals = {"memory": plan.memory.total, "fullest": plan.fullest.total}
        facts = dataclasses.asdict(plan)
        for name, total in totals.items():
            facts[name]["total"] = total
        print(json.dumps(facts, indent=2))
        return exit_codes.DONE
    print("\n".join(lines_of(plan)))
    return exit_codes.DONE


def lines_of(plan: "LayoutPlan") -> list[str]:
    """The plan for people."""
    axes = " x ".join(f"{name} {size}" for name, size in plan.axes.items() if size > 1 and name != "data") or "one rank"
    lines = [
        f"layout      {plan.ranks:,} ranks: {axes}; {plan.axes['data']:,} parts of the batch, {plan.micro_batches:,} micro-batches a step",
        f"model       {plan.num_params:,} parameters, {plan.precision} on {'a CPU' if plan.device == 'cpu' else 'GPUs'}",
        "",
        f"memory of a rank, GiB {'rank 0':>12}"
        + (f"{f'pp {plan.fullest_pp}, fullest':>16}" if plan.fullest_pp else ""),
    ]
    for field, source in (
        ("weights", "counted"),
        ("moments", "counted"),
        ("gradients", "formula"),
        ("gathered", "formula: weights as products read them"),
        ("activations", "formula: kept for the backward"),
        ("passing", "formula: logits, or a block computed again"),
        ("total", ""),
    ):
        lines.append(_memory_line(field, source, plan.memory, plan.fullest if plan.fullest_pp else None))
    lines += ["", f"one step of rank 0{'calls':>14}{'bytes':>10}{'sent':>10}   by theory"]
    for flow in plan.flows:
        calls = f"{flow.calls:,}" if flow.calls else "-"
        lines.append(f"{flow.axis:<10}{flow.kind:<15}{calls:>7}{short(flow.payload):>10}{short(flow.sent):>10}")
    if not plan.flows:
        lines.append("nothing is sent")
    return lines


def _memory_line(field: str, source: str, first: "Memory", fullest: "Memory | None") -> str:
    text = f"{field:<22}{getattr(first, field) / GIB:>12.3f}"
    if fullest is not None:
        text += f"{getattr(fullest, field) / GIB:>16.3f}"
    return f"{text}   {source}".rstrip()
