"""``surefoot advise``: learning rate, batch size, warm-up and decay by published laws, side by side, and by your own sweeps."""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from surefoot.cli import exit_codes
from surefoot.config.errors import ConfigError
from surefoot.scale.advise import TIMESCALE, Advice, Run, advise, parse_count, short
from surefoot.scale.own_sweeps import Measured, measured_in

HEADS = ("law", "lr", "batch, tokens", "steps", "warm-up, steps", "weight decay", "beta2", "fitted there?")


def main(argv: Sequence[str]) -> int:
    """Runs ``surefoot advise``."""
    args = _parser().parse_args(argv)
    problems: list[str] = []
    num_params = _count("params", args.params, problems)
    num_tokens = _count("tokens", args.tokens, problems)
    if args.loss is not None and not 0.0 < args.loss < 100.0:
        problems.append(f"--loss {args.loss:g}: nats per token, above 0, as in 2.8")
    if problems:
        raise ConfigError(problems)
    run = Run(num_params, num_tokens)
    found = advise(run, loss=args.loss)
    own = [one for folder in args.sweep for one in measured_in(folder)]
    print(json.dumps(to_facts(run, found, own), indent=2, allow_nan=False) if args.json else _text(run, found, own))
    return exit_codes.DONE


def _count(name: str, text: str, problems: list[str]) -> float:
    try:
        return parse_count(text)
    except ValueError:
        problems.append(f"--{name} {text}: not a count above 0; write it as 125M, 2.5B or 1e9")
        return 1.0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="surefoot advise",
        description="What published laws, and your own sweeps, say of a run: peak learning rate and decay of AdamW, batch size, warm-up. "
        "Laws disagree; where each was fitted is said, and a run outside of that is marked. Nothing here was measured on your data "
        "but what --sweep brings.",
        allow_abbrev=False,
    )
    parser.add_argument("--params", required=True, metavar="N", help="parameters without embeddings, as in 125M")
    parser.add_argument("--tokens", required=True, metavar="D", help="tokens the run trains on, as in 2.5B")
    parser.add_argument(
        "--loss", type=float, metavar="L", help="nats per token you expect at the end: adds a critical batch size"
    )
    parser.add_argument(
        "--sweep",
        type=Path,
        action="append",
        default=[],
        metavar="FOLDER",
        help="the --out of a sweep or transfer; repeat it",
    )
    parser.add_argument("--json", action="store_true", help="JSON on standard output")
    return parser


def _text(run: Run, found: Sequence[Advice], own: Sequence[Measured]) -> str:
    from surefoot.proof.tables import text_table

    parts = [
        f"{short(run.num_params)} parameters, {short(run.num_tokens)} tokens ({run.tokens_per_param:.3g} a parameter), {run.flops:.2e} FLOP",
        text_table(HEADS, [row(run, one) for one in found]),
        f"* weight decay by the AdamW timescale of that rate and batch ({TIMESCALE}); the others are the law's own.",
    ]
    parts.append("\n".join(_remark(one) for one in found))
    if own:
        parts.append("Your own sweeps:\n" + "\n".join(f"  {told(one, run)}" for one in own))
    return "\n\n".join(parts)


def row(run: Run, one: Advice) -> tuple[str, ...]:
    """One law of the table."""
    batch, warmup = one.batch_tokens, one.warmup_tokens
    return (
        one.law,
        f"{one.lr:.2e}" if one.lr is not None else "",
        short(batch) if batch is not None else "",
        f"{max(1, round(run.num_tokens / batch)):,}" if batch is not None else "",
        f"{max(1, round(warmup / batch)):,}" if warmup is not None and batch is not None else "",
        f"{one.weight_decay:.2g}{'*' if one.decay_source == TIMESCALE else ''}" if one.weight_decay is not None else "",
        f"{one.beta2:g}" if one.beta2 is not None else "",
        "OUTSIDE" if one.outside else "inside",
    )


def _remark(one: Advice) -> str:
    schedule = f" Schedule: {one.schedule}." if one.schedule else ""
    outside = f" OUTSIDE: {'; '.join(one.outside)}." if one.outside else ""
    return f"{one.law} ({one.source}):{outside}{schedule} {one.note[0].upper()}{one.note[1:]}."


def told(one: Measured, run: Run) -> str:
    """One measurement, and how far it speaks for the run that is asked about."""
    size, length = one.same_size(run.num_params), one.same_length(run.num_tokens)
    if size and length:
        of = "this size and length"
    elif size:
        of = f"this size, but {short(one.num_tokens)} tokens: longer runs want another rate"
    else:
        of = "another size: holds here only under a parametrization that transfers (see surefoot transfer)"
    return (
        f"{short(one.num_params)} parameters, {short(one.num_tokens)} tokens, batch {short(one.batch_tokens)}: lr {one.lr:.2e} ({one.low:.2e} to "
        f"{one.high:.2e}), loss {one.loss:.4f}; {one.how}; {of} [{one.place}]"
    )


def to_facts(run: Run, found: Sequence[Advice], own: Sequence[Measured]) -> dict[str, Any]:
    """What ``--json`` prints."""
    return {
        "num_params": run.num_params,
        "num_tokens": run.num_tokens,
        "flops": run.flops,
        "laws": [dataclasses.asdict(one) | {"inside": not one.outside} for one in found],
        "own": [
            dataclasses.asdict(one)
            | {"same_size": one.same_size(run.num_params), "same_length": one.same_length(run.num_tokens)}
            for one in own
        ],
    }
