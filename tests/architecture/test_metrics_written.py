"""The table of metrics promises what rows hold: an entry that nothing writes is dead."""

import re
from pathlib import Path

import pytest

from surefoot.monitor.metrics import METRICS

TRAIN = Path(__file__).parents[2] / "src" / "surefoot" / "train"
SOURCE = "".join(path.read_text() for path in TRAIN.glob("*.py"))


@pytest.mark.parametrize("name", [metric.name for metric in METRICS])
def test_every_metric_of_the_table_is_written_by_the_trainer(name: str) -> None:
    before, *after = re.split(r"<\w+>", name)
    assert f'"{name}"' in SOURCE or (after and re.search(f'f"{before}{{[\\w.]+}}{after[0]}"', SOURCE)), name
