"""``surefoot export``: a run's weights as a model folder of Hugging Face transformers."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from surefoot.cli import exit_codes
from surefoot.cli.run_folder import run_folder
from surefoot.config.errors import ConfigError


def main(argv: Sequence[str]) -> int:
    """Run one ``surefoot export`` command."""
    parser = argparse.ArgumentParser(
        prog="surefoot export",
        description="Writes the weights of a run's newest good checkpoint for Hugging Face transformers, one tensor in memory at a time, "
        "whatever layout the run had.",
        allow_abbrev=False,
    )
    parser.add_argument("run", type=run_folder, metavar="RUN")
    parser.add_argument("--to", required=True, type=Path, metavar="FOLDER", help="new folder for the model")
    parser.add_argument("--at", type=int, metavar="STEP", help="step of the checkpoint (default: the newest good one)")
    parser.add_argument("--shard-gib", type=float, default=5.0, help="most weights in one file, GiB (default 5)")
    parser.add_argument("--json", action="store_true", help="JSON on standard output")
    args = parser.parse_args(argv)
    problems = []
    if args.to.exists():
        problems.append(f"--to {args.to}: exists; give a folder that is not there yet")
    if not args.shard_gib > 0:
        problems.append(f"--shard-gib {args.shard_gib}: must be more than 0")
    if problems:
        raise ConfigError(problems)
    from surefoot.config.codec import from_toml
    from surefoot.config.run import RunConfig
    from surefoot.interop.sharded_export import export_checkpoint
    from surefoot.monitor.run import Run
    from surefoot.train.restored import choose_checkpoint

    chosen = choose_checkpoint(Run(args.run), args.at)
    tokenizer = args.run / "tokenizer.json"
    done = export_checkpoint(
        args.run / "checkpoints" / chosen.name,
        from_toml(RunConfig, args.run / "config.toml"),
        args.to,
        tokenizer=tokenizer if tokenizer.exists() else None,
        shard_gib=args.shard_gib,
        verified=True,
    )
    told = {
        "checkpoint": chosen.name,
        "folder": str(done.folder),
        "files": list(done.files),
        "num_parameters": done.num_parameters,
        "num_bytes": done.num_bytes,
    }
    if args.json:
        print(json.dumps(told))
    else:
        files = f"{len(done.files)} file{'s' if len(done.files) > 1 else ''}"
        print(
            f"{done.folder}: {chosen.name}, {done.num_parameters:,} parameters, {done.num_bytes / 1024**3:.2f} GiB in {files}"
        )
    return exit_codes.DONE
