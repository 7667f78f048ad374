"""Where a run ends: at a step worked out before it starts, or one that rank 0's clock decides on the way.

A run bounded by hours or money does not know its last step. Rank 0 compares, after every batch, the time that is left with the time that a
decay beginning now would take, by the pace of the last batches; when the decay has to begin it writes the last step and the length of the
decay into the ledger (row ``horizon``), on every rank before the next batch. From then on the rate is a closed form again, after a rollback
or a resume as well. A decay for which there is no time left is cut to what there is. A schedule without a decay ends when the time is over.
Time is training time over all attempts: every row holds what was spent until then (``perf/train_s``), so a resumed run goes on counting from
the most that any row on disk says.
"""

import math
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from typing import Any

from surefoot.config.optim import WSD
from surefoot.data.mixture import BatchStarts
from surefoot.monitor.run import Run
from surefoot.optim.schedule import Landing, decay_steps, landing, landing_within
from surefoot.train.budget import OPEN_END, bound_seconds
from surefoot.train.keeping import Keeping
from surefoot.train.setup import Setup
from surefoot.train.state import TrainState

RECENT = 512
"""Batches whose pace says how long the decay will take."""

FEW = 5
"""Batches whose pace is not yet trusted to cut a decay, while there is time for twice as many."""

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

    @property
    def end(self) -> Landing:
        """The last step, and the decay before it where the clock decided its length."""
        return Landing(self.steps, self.keeping.ledger.decay_steps if self.seconds else 0.0)

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
        """The fields of the row, once the decay that begins now would end with the bound, or the time is over."""
        first, stop = self.starts.rows_of(state.batch_index)
        self._lately.append((self._spent, stop - first))
        left, pace = self.seconds - self._spent, self._seconds_per_row()
        decided = {"batch_index": state.batch_index - 1, "step": state.step, "train_s": self._spent}
        schedule, begin = self.setup.config.optim.schedule, self._first_step()
        if not isinstance(schedule, WSD):
            return None if left > 0 else decided | {"last_step": max(state.step, 1), "decay_steps": 0.0}
        wanted = landing(schedule, state.step, begin).last_step - state.step
        if left > 0 and (math.isnan(pace) or left > self._rows_of_next(state, wanted) * pace):
            return None
        fit = 0
        if left > 0:
            fit = bisect_right(range(1, wanted + 1), left / pace, key=lambda n: self._rows_of_next(state, n))
        end = landing_within(schedule, state.step, fit, begin)
        if end.last_step - state.step < wanted and len(self._lately) < FEW and fit >= 2 * FEW:
            return None
        asked = schedule.decay_steps or round(decay_steps(schedule, end.last_step - begin))
        return decided | {"last_step": end.last_step, "decay_steps": end.decay_steps, "decay_asked": asked}

    def _rows_of_next(self, state: TrainState, count: int) -> int:
        """Rows of so many batches from the next one on."""
        return self.starts.rows_of(state.batch_index + count - 1)[1] - self.starts.rows_of(state.batch_index)[0]

    def _first_step(self) -> int:
        """Updates that the weights had when the run began: those of its parent, where it is a fork."""
        attempts = self.keeping.ledger.attempts
        return attempts[0].from_step if attempts else 0

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
