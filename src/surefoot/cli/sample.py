"""``surefoot sample``: continue a text with a trained model."""

import argparse
import json
from collections.abc import Sequence

from surefoot.cli import exit_codes
from surefoot.cli.run_folder import run_folder
from surefoot.config.errors import ConfigError


def main(argv: Sequence[str]) -> int:
    """Run one ``surefoot sample`` command."""
    parser = argparse.ArgumentParser(
        prog="surefoot sample", description="Continues a text with a run's newest good checkpoint.", allow_abbrev=False
    )
    parser.add_argument("run", type=run_folder, metavar="RUN")
    parser.add_argument("--prompt", required=True, help="text to continue")
    parser.add_argument("--tokens", type=int, default=128, help="most tokens to draw (default 128)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default 0.8)")
    parser.add_argument("--top-k", type=int, default=0, help="draw among the k likeliest; 0 among all (default)")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same text (default 0)")
    parser.add_argument("--at", type=int, metavar="STEP", help="step of the checkpoint (default: the newest good one)")
    parser.add_argument("--json", action="store_true", help="JSON on standard output")
    args = parser.parse_args(argv)
    problems = [
        f"--{name} {value}: {rule}"
        for name, value, rule, bad in (
            ("prompt", repr(args.prompt), "give some text to continue", not args.prompt),
            ("tokens", args.tokens, "must be at least 1", args.tokens < 1),
            ("temperature", args.temperature, "must be 0 or more", not args.temperature >= 0),
            ("top-k", args.top_k, "must be 0 or more", args.top_k < 0),
        )
        if bad
    ]
    if problems:
        raise ConfigError(problems)
    from surefoot.train.restored import open_model

    model = open_model(args.run, args.at)
    text = model.continue_text(args.prompt, args.tokens, temperature=args.temperature, top_k=args.top_k, seed=args.seed)
    if args.json:
        print(json.dumps({"checkpoint": model.checkpoint, "prompt": args.prompt, "continuation": text}))
    else:
        print(args.prompt + text)
    return exit_codes.DONE
