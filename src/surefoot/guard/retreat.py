"""How far to go back: to before the trouble began, and further each time it comes again."""

from surefoot.guard.record import Record


def repeats(record: Record, batch_index: int, cooldown: int) -> int:
    """Rollbacks in a row that this trouble has outlived: each followed by the next within ``cooldown`` batches of where it was seen."""
    count, seen = 0, batch_index
    for past in reversed(record.rollbacks):
        if seen - past.at_batch > cooldown:
            break
        count, seen = count + 1, past.at_batch
    return count


def target(record: Record, batch_index: int, wanted: int, cooldown: int) -> int:
    """Batch to go back to: the wanted one, but at least twice as far from the trouble as the last rollback that did not cure it.

    That one's distance counts from where it was seen to the state it got, which may be older than what it asked for.
    """
    if repeats(record, batch_index, cooldown):
        last = record.rollbacks[-1]
        distance = max(1, last.at_batch - last.from_batch)
        wanted = min(wanted, min(batch_index, last.at_batch) - 2 * distance)
    return max(0, min(wanted, batch_index))
