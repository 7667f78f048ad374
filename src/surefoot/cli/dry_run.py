"""``surefoot train --dry-run``: what a run would be, without data and without writing."""

import dataclasses
import json
import os
from pathlib import Path

from surefoot.cli import exit_codes
from surefoot.config.data import Shards
from surefoot.config.fingerprint import fingerprint
from surefoot.config.layout_search import check_layout
from surefoot.config.run import ByFlops, ByHours, ByMoney, BySteps, ByTokens, RunConfig
from surefoot.monitor.wording import duration, short


def show_dry_run(config: RunConfig, folder: Path, *, as_json: bool) -> int:
    """Print parameters, FLOPs, memory and one step of a config; sources that are not there are a DataError, but nothing is read."""
    from surefoot.data.prepared import open_source
    from surefoot.data.source import list_names
    from surefoot.parallel.mesh import join_world, leave_world
    from surefoot.train.dry_run import dry_run
    from surefoot.train.run import settle

    for source in config.data.sources:
        if isinstance(source.documents, Shards):
            open_source(source.name, Path(source.documents.path))
        else:
            list_names(source.documents)
    check_layout(config, int(os.environ.get("WORLD_SIZE", "1")))  # before ranks wait for each other
    world = join_world(config.parallel, strict=config.determinism == "strict")
    try:
        settled = settle(config, None, world)
        plan = dry_run(settled, world)
    finally:
        leave_world()
    if not world.leads:
        return exit_codes.DONE
    print_ = fingerprint(config)
    if as_json:
        facts = dataclasses.asdict(plan) | {"config_fingerprint": print_, "folder": str(folder)}
        print(json.dumps(facts | {"precision": settled.parallel.precision}, indent=2))
        return exit_codes.DONE
    seen = "exists: training would continue there" if folder.exists() else "would be made"
    for name, text in (
        ("config", f"{print_}, valid"),
        ("run folder", f"{folder} ({seen})"),
        ("parameters", f"{plan.num_params:,} ({plan.embedding_params:,} of them embedding)"),
        ("tokens", f"{short(plan.total_tokens)} in {_steps(config, plan.steps)} of {short(plan.tokens_per_step)}"),
        (
            "FLOPs",
            f"{plan.flops_per_token:.3g} per token forward and backward (full attention: "
            f"{plan.flops_per_token_full_attention:.3g}), {plan.total_flops:.3g} in all",
        ),
        (
            "memory",
            f"{plan.state_gib:.2f} GiB weights, gradients and moments, {plan.activation_gib:.2f} activations, "
            f"{plan.snapshot_gib:.2f} snapshots; this process peaked at {plan.peak_memory_gib:.2f}",
        ),
        (
            "one step",
            f"{plan.step_s:.2f} s in {settled.parallel.precision}, loss {plan.loss:.3f} on random tokens; all steps: about "
            f"{duration(plan.estimated_s)}",
        ),
        ("written", "nothing"),
    ):
        print(f"{name:<11} {text}")
    return exit_codes.DONE


def _steps(config: RunConfig, steps: int) -> str:
    """The steps of the run, and what they follow from."""
    match config.bound:
        case BySteps():
            return f"{steps:,} steps"
        case ByTokens(tokens=tokens):
            return f"{steps:,} steps (bound.tokens={tokens:g})"
        case ByFlops(flops=flops):
            return f"{steps:,} steps (bound.flops={flops:g})"
        case ByHours(hours=hours):
            return f"about {steps:,} steps (bound.hours={hours:g}, at the speed of one step here)"
        case ByMoney(money=money):
            return f"about {steps:,} steps (bound.money={money:g}, at the speed of one step here)"
