"""Where a run ends: at a step worked out before it starts, or one that rank 0's clock decides on the way.

A run bounded by hours or money does not know its last step. Rank 0 compares, after every batch, the time that is left with the time that a
decay beginning now would take, by the pace of the last batches; when the decay has to begin it writes the last step into the ledger (row
``horizon``), on every rank before the next batch. From then on the rate is a closed form again, after a rollback or a resume as well.
Time is training time over all attempts: every row holds what was spent until then (``perf/train_s``), so a resumed run goes on counting from
the most that any row on disk says.
"""

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from surefoot.config.optim import WSD
from surefoot.data.mixture import BatchStarts
from surefoot.monitor.run import Run
from surefoot.optim.schedule import landing
from surefoot.train.budget import OPEN_END, bound_seconds
from surefoot.train.keeping import Keeping
from surefoot.train.setup import Setup
from surefoot.train.state import TrainState

RECENT = 512
"""Batches whose pace says how long the decay will take."""

Clock = Callable[[], float]
"""Seconds from some moment on."""


class Horizon:
    """The last step of a run, and the clock that decides it where the bound is hours or money."""

    def __init__(self, setup: Setup, starts: BatchStarts, keeping: Keeping, clock: Clock = time.monotonic) -> None:
        self.setup, self.starts, self.keeping, self.clock = setup, starts, keeping, clock
        self.seconds = bound_seconds(setup.config)
        self._lately: deque[tuple[float, int]] = deque(maxlen=RECENT)
        """Time after a batch, and its rows."""
        self._before = spent_before(keeping) if self.seconds else 0.0
        self._began = clock() if self.seconds else 0.0
        self._spent = self._before

    @property
    def steps(self) -> int:
        """Updates at which the run ends; ``OPEN_END`` while the clock has not decided it."""
        return (self.keeping.ledger.horizon or OPEN_END) if self.seconds else self.setup.num_steps

    def spent(self) -> dict[str, float]:
        """Read the clock, once a batch: the row's ``perf/train_s``, where the run is bounded by time."""
        if not self.seconds:
            return {}
        self._spent = self._before + self.clock() - self._began
        return {"perf/train_s": self._spent}

    def watch(self, state: TrainState) -> None:
        """After a batch: decide the last step when the decay has to begin, and note it in the ledger. Collective."""
        if not self.seconds or self.keeping.ledger.horizon:
            return
        decided = self.keeping.from_leader(self._decide(state) if self.keeping.store else None)
        if decided:
            self.keeping.record("horizon", **decided)

    def _decide(self, state: TrainState) -> dict[str, Any] | None:
        """The fields of the row, once the decay that begins now would end with the bound."""
        rows = self.starts.rows_of(state.batch_index)
        self._lately.append((self._spent, rows[1] - rows[0]))
        schedule = self.setup.config.optim.schedule
        assert isinstance(schedule, WSD)
        last = landing(schedule, state.step)
        to_read = self.starts.rows_of(state.batch_index + last - state.step - 1)[1] - rows[0]
        left = self.seconds - self._spent
        pace = self._seconds_per_row()
        if left > 0 and (math.isnan(pace) or left > to_read * pace):
            return None
        return {"batch_index": state.batch_index - 1, "step": state.step, "last_step": last, "train_s": self._spent}

    def _seconds_per_row(self) -> float:
        """From the end of the first batch that is remembered to the end of the last; NaN before the second."""
        if len(self._lately) < 2:
            return math.nan
        rows = sum(count for _, count in self._lately) - self._lately[0][1]
        return (self._lately[-1][0] - self._lately[0][0]) / rows


def spent_before(keeping: Keeping) -> float:
    """Training time of earlier attempts, by the rows they left, those of abandoned ones too; 0 on ranks that keep none."""
    if not keeping.store:
        return 0.0
    keeping.store.flush()
    return max((float(row.get("perf/train_s", 0.0)) for row in Run(keeping.folder).written_rows), default=0.0)
