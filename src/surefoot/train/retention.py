"""Which checkpoints stay: the last few, every n-th for good, and a ladder of certified ones to go back to."""

import re
from collections.abc import Collection, Mapping, Sequence

_NAME = re.compile(r"(?:fork-)?step-(\d{6,})-attempt-(\d{4,})(?:-batch-\d{6,})?")


def checkpoint_name(step: int, attempt: int) -> str:
    """Folder name of the checkpoint after ``step`` applied updates, such as ``step-000400-attempt-0001``."""
    return f"step-{step:06d}-attempt-{attempt:04d}"


def parse_checkpoint_name(name: str) -> tuple[int, int]:
    """(step, attempt) of a checkpoint's folder name."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} is not a checkpoint's name; expected the form {checkpoint_name(400, 1)}")
    return int(match[1]), int(match[2])


def to_delete(
    names: Sequence[str], *, keep_last: int, keep_every: int = 0, certified: Collection[str] = ()
) -> list[str]:
    """The checkpoints to delete out of the whole ones of the surviving lineage, given and returned oldest first.

    Kept are the newest ``keep_last``, those whose step is a multiple of ``keep_every`` (0 is none) and, of those in ``certified``, the
    rungs of ``ladder``: without them a rollback would have nowhere to go.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last={keep_last}: at least 1 checkpoint is kept, or a resume has nothing to start from")
    if keep_every < 0:
        raise ValueError(f"keep_every={keep_every}: a number of steps, or 0 for none")
    steps = {name: parse_checkpoint_name(name)[0] for name in names}
    kept = set(names[-keep_last:])
    kept.update(name for name, step in steps.items() if keep_every and step % keep_every == 0)
    kept.update(ladder({name: steps[name] for name in names if name in certified}))
    return [name for name in names if name not in kept]


def ladder(certified: Mapping[str, int]) -> list[str]:
    """Of certified checkpoints (name -> step, oldest first), those a rollback may have to go back to: at most three.

    The newest; the one before it, so many steps older; and the oldest of those between twice and four times as much older. The last rung
    moves along by itself: of the checkpoints that pass through its range one is always kept until the next has come in.
    """
    if len(certified) < 3:
        return list(certified)
    *older, second, newest = certified
    gap = max(1, certified[newest] - certified[second])
    deep = [name for name in older if 2 * gap <= certified[newest] - certified[name] < 4 * gap]
    rung = deep[0] if deep else older[-1]
    return [rung, second, newest]
