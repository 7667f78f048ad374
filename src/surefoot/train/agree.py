"""Every rank judges for itself, from the same numbers: here they find out at once when one of them judged otherwise."""

from surefoot.guard.guard import Verdict, action_name, verdict_digest
from surefoot.parallel.mesh import EnvironmentFault, World
from surefoot.parallel.reduce import from_every_rank, max_over_ranks


class VerdictsDiffer(EnvironmentFault):
    """Ranks that saw the same numbers do not agree on what to do about them."""


def agree(verdict: Verdict, world: World) -> None:
    """Compare this rank's verdict with that of the others, before it is acted on. Collective.

    One tiny reduction: a number is the same everywhere where its maximum is its minimum. Raises VerdictsDiffer, on every rank, naming
    those that disagree with rank 0.
    """
    if world.size == 1:
        return
    mine = float(verdict_digest(verdict))
    # -max(-x) is the minimum
    top, bottom = max_over_ranks([mine, -mine], world).tolist()
    if top == -bottom:
        return
    said = from_every_rank((mine, action_name(verdict.action)), world)
    others = [f"rank {rank} says {action}" for rank, (digest, action) in enumerate(said) if digest != said[0][0]]
    raise VerdictsDiffer(
        f"the guard of rank 0 says {said[0][1]}, but {', '.join(others[:3])}{' ..' if len(others) > 3 else ''}, on the same reduced "
        "numbers: that rank's memory or processor is at fault, or it runs other software. Nothing was done about the batch; take the "
        "machine out, and the same command continues from the newest checkpoint"
    )
