"""``surefoot parity``: whether layout changes training: a recipe made small, as one process and under every layout."""

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from surefoot.cli import exit_codes
from surefoot.cli.train_args import parse_train_args
from surefoot.config.errors import ConfigError

_USAGE = "surefoot parity RECIPE [flags] [--config FILE] [--key value ...]"
_PRECISIONS = ("fp64", "fp32", "bf16")


def main(argv: Sequence[str]) -> int:
    """Runs ``surefoot parity``; 0 when every layout passes, 1 when one does not."""
    args, settings = _parser().parse_known_args(argv)
    config = parse_train_args([args.recipe, *settings]).config
    precisions = _precisions(args.precision or ("fp64" if args.quick else ",".join(_PRECISIONS)))
    # Ranks share the cores, and a forked child may not have more threads than one.
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # DDP warns in C++, per rank, of what strict mode does
    from surefoot.proof.parity import parity_of
    from surefoot.proof.parity_page import facts, markdown_page, text_page
    from surefoot.proof.parity_results import chosen, passed, run_rows

    cells = chosen(args.only, quick=args.quick)
    if not cells:
        titles = ", ".join(cell.title for cell in chosen("", quick=args.quick))
        raise ConfigError([f"--only {args.only!r} is no part of a layout's name; there are: {titles}"])
    begun = time.monotonic()
    command = "surefoot parity " + shlex.join(argv)
    with parity_of(config) as parity:
        rows = run_rows(parity, cells, precisions, command, _say, args.out)
    if args.markdown:
        args.markdown.write_text(markdown_page(args.out))
    if args.json:
        print(json.dumps(facts(rows, precisions), indent=2))
    else:
        print(text_page(rows, precisions) + f" ({time.monotonic() - begun:.0f} s)")
    good = all(passed(row["results"][name]) for row in rows for name in precisions)
    return exit_codes.DONE if good else exit_codes.INTERNAL


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="surefoot parity",
        usage=_USAGE,
        description="Makes a recipe small and trains it for three steps as one process, and then under every layout: micro-batches, recomputation, "
        "compilation, replicas, shards, tensor, context and pipeline parallel ranks, products of them on up to 8 processes, and saved under one and "
        "resumed under another. Compares sample ids, losses, every gradient, weights and optimiser state, metrics, guard signals and state digest. "
        "Also holds the one process against a count by hand. Runs on the CPU. Further settings are those of `surefoot train`; the layout is parity's "
        "own.",
        allow_abbrev=False,
    )
    parser.add_argument("recipe", metavar="RECIPE", help="a recipe by name")
    parser.add_argument("--quick", action="store_true", help="a few layouts in fp64, under a minute on two cores")
    parser.add_argument(
        "--only", default="", metavar="PATTERN", help="layouts whose name holds this; * stands for anything"
    )
    parser.add_argument(
        "--precision",
        default="",
        metavar="NAME,NAME..",
        help=f"columns (default: {','.join(_PRECISIONS)}; with --quick: fp64)",
    )
    parser.add_argument("--json", action="store_true", help="JSON on standard output")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="keep one result file per layout; those that passed are not run again",
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write what --out holds as Markdown, too")
    return parser


def _precisions(text: str) -> tuple[str, ...]:
    words = tuple(word for word in text.split(",") if word)
    if bad := [word for word in words if word not in _PRECISIONS]:
        raise ConfigError([f"--precision {bad[0]}: one of {', '.join(_PRECISIONS)}"])
    return words


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
