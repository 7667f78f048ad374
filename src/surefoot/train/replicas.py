"""Whether all ranks still hold the same state: the digest of a batch's state, and the way back where replicas differ."""

from dataclasses import dataclass, replace

from surefoot.guard.actions import Halt, Rollback
from surefoot.guard.replicas import judge_replicas
from surefoot.parallel.digest import ReplicasDiffer, combine, digest_tensors
from surefoot.train.acting import Judged
from surefoot.train.agree import agree
from surefoot.train.keeping import Keeping
from surefoot.train.rows import due
from surefoot.train.setup import Setup
from surefoot.train.state import TrainState


@dataclass
class Replicas:
    """What is known of them. Memory of the loop."""

    same_at: int
    """Newest batch counter of a state of which every rank held the same bits: one as it was drawn or loaded, or one that was looked at."""
    digest: str = ""
    """Of the state after the last batch, where it was looked at."""

    def look(self, judged: Judged, state: TrainState, setup: Setup, keeping: Keeping, *, last: bool) -> Judged:
        """Take the state's digest where the cadence, a checkpoint or the end asks for it; where replicas differ, the verdict becomes the
        guard's about that. Collective.

        A batch's own verdict gives way: whatever it says was found out with a state that is broken. Raises ReplicasDiffer where the guard
        only observes, or knows no way back.
        """
        self.digest = ""
        config = setup.config
        steps = config.log.digest_every, config.checkpoint.every
        if not (last or (not judged.outcome.skipped and any(due(state.step, every) for every in steps))):
            return judged
        try:
            self.digest = combine(digest_tensors(state.tensors()))
        except ReplicasDiffer as fault:
            if config.guard.policy == "observe":
                raise
            spent = keeping.ledger.record_at(judged.batch.batch_index)
            verdict = judge_replicas(
                judged.verdict.state, judged.outcome.signals, config.guard, spent, in_words(fault), self.same_at
            )
            if not isinstance(verdict.action, Rollback | Halt):
                raise
            agree(verdict, setup.world)
            return replace(judged, concluded=verdict)
        self.same_at = state.batch_index
        return judged

    def went_back(self, state: TrainState) -> None:
        """An earlier state was restored."""
        self.same_at = min(self.same_at, state.batch_index)


def in_words(fault: ReplicasDiffer) -> str:
    """Tensors and ranks, without a full stop."""
    ranks = ", ".join(str(rank) for rank in fault.suspects)
    told = "; ".join(split.sentence() for split in fault.splits[:3])
    more = f" (and {len(fault.splits) - 3} more pieces)" if len(fault.splits) > 3 else ""
    named = f"suspect {'rank' if len(fault.suspects) == 1 else 'ranks'} {ranks}"
    return f"replicas hold different bits, {told}{more}; {named}"
