"""A run as people name it: its folder, or its name below ``runs``."""

from pathlib import Path

RUNS = Path("runs")
"""Where run folders go by default."""


def run_folder(text: str) -> Path:
    """The folder as given, or ``runs/<text>`` where only that is there."""
    path = Path(text)
    return RUNS / path if not path.exists() and (RUNS / path).is_dir() else path
