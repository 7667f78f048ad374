"""``surefoot coordcheck``: whether activations keep their size as a recipe grows, under a parametrization and under the standard one."""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from surefoot.cli import exit_codes
from surefoot.cli.train_args import parse_train_args
from surefoot.config.errors import ConfigError

if TYPE_CHECKING:  # help must answer at once, and the check takes torch
    from surefoot.scale.coordcheck import CoordinateCheck

_USAGE = "surefoot coordcheck RECIPE [flags] [--config FILE] [--key value ...]"


def main(argv: Sequence[str]) -> int:
    """Runs ``surefoot coordcheck``; 0 whatever the verdict, which is a fact and stands in the output."""
    args, settings = _parser().parse_known_args(argv)
    config = parse_train_args([args.recipe, *settings]).config
    if args.lr is not None:
        config = dataclasses.replace(config, optim=dataclasses.replace(config.optim, lr=args.lr))
    widths, depths = _sizes("--widths", args.widths), _sizes("--depths", args.depths)
    from surefoot.config.validate import validate

    if problems := validate(config):
        raise ConfigError(problems)
    from surefoot.parallel.mesh import join_world
    from surefoot.scale.coord_page import coordinate_page
    from surefoot.scale.coordcheck import Plan, check_coordinates, choose_kind

    kind = choose_kind(config, args.parametrization)
    plan = Plan(config=config, kind=kind, widths=widths, depths=depths, steps=args.steps, seeds=args.seeds)
    begun = time.monotonic()
    check = check_coordinates(plan, join_world(config.parallel), _say)
    out = args.out or Path("runs") / f"coordcheck-{config.recipe}-{kind}"
    out.mkdir(parents=True, exist_ok=True)
    facts = check.to_dict()
    (out / "coordcheck.json").write_text(json.dumps(facts, indent=1, allow_nan=False))
    page = out / "coordcheck.html"
    page.write_text(coordinate_page(check))
    if args.json:
        print(json.dumps({name: value for name, value in facts.items() if name != "coordinates"}, indent=2))
    else:
        print(_text(check))
        print(f"\n{page} shows the curves ({time.monotonic() - begun:.0f} s)")
    return exit_codes.DONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="surefoot coordcheck",
        usage=_USAGE,
        description="Trains a recipe at several widths and depths for a few steps on one small synthetic batch, under a parametrization and, at "
        "the same rate, under the standard one, and says how the change of each activation grows with size. flat: every slope is below 0.1 "
        "in size while standard shows one beyond 0.3; inconclusive where standard does not. Further settings are those of `surefoot train`.",
        allow_abbrev=False,
    )
    parser.add_argument("recipe", metavar="RECIPE", help="a recipe by name")
    parser.add_argument(
        "--widths", default="64,128,256,512", metavar="N,N..", help="d_model; '' for none (default: %(default)s)"
    )
    parser.add_argument(
        "--depths",
        default="2,4,8,16",
        metavar="N,N..",
        help="num_layers, for completep; '' for none (default: %(default)s)",
    )
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="updates (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="models of each size (default: %(default)s)")
    parser.add_argument("--lr", type=float, metavar="X", help="the same as --optim.lr (default: the recipe's)")
    parser.add_argument(
        "--parametrization",
        default="",
        metavar="KIND",
        help="mup or completep (default: the recipe's own; completep, which is mup in width, for a standard one, its base the smallest sizes)",
    )
    parser.add_argument("--json", action="store_true", help="JSON on standard output")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="for coordcheck.html and coordcheck.json (default: runs/coordcheck-RECIPE-KIND)",
    )
    return parser


def _sizes(flag: str, text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if bad := [word for word in words if not word.isdigit()]:
        raise ConfigError([f"{flag} {text}: {bad[0]!r} is not a whole number; give them as 64,128,256"])
    return tuple(map(int, words))


def _text(check: "CoordinateCheck") -> str:
    from surefoot.scale.coord_page import sentence

    lines = [f"{'slope of the change with':<26}{check.plan.kind:>12}  {'(95 %)':<16}{'standard':>10}  (95 %)"]
    for name, slope in check.slopes.items():
        control = check.control_slopes[name]
        axis, _, quantity = name.partition("/")
        label = f"{axis}: {quantity.replace('_', ' ')}"
        own, other = (f"{s.value:+.3f}  {f'({s.low:+.2f} to {s.high:+.2f})'}" for s in (slope, control))
        lines.append(f"{label:<30}{own:<26}{other}")
    return "\n".join([*lines, "", *(sentence(check, axis) for axis in check.axes), f"verdict: {check.verdict}"])


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
