"""``surefoot report``: a run as one offline page."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from surefoot.cli import exit_codes
from surefoot.cli.run_folder import run_folder


def main(argv: Sequence[str]) -> int:
    """Run one ``surefoot report`` command."""
    parser = argparse.ArgumentParser(
        prog="surefoot report", description="Writes a run's report: one page that opens offline.", allow_abbrev=False
    )
    parser.add_argument("run", type=run_folder, metavar="RUN", help="run folder; the run may still be going")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: RUN/report.html")
    args = parser.parse_args(argv)
    from surefoot.monitor.report import write_report

    print(write_report(args.run, args.out))
    return exit_codes.DONE
