"""Which documents are held out: decided by a document's own text, so that duplicates never stand on both sides."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from surefoot.data.errors import DataError
from surefoot.data.extract import Extracted
from surefoot.data.shards import Split


@dataclass(frozen=True)
class Sides:
    """A source's documents, each once: training ones in the order of their names, held-out ones in that of their ids.

    Ids are hashes, so the first held-out rows are a fair sample of all of them.
    """

    train: list[Extracted]
    val: list[Extracted]
    dropped: int
    """Documents left out because the same text is there already, here or on the other side of another source."""


def divide(found: Sequence[Extracted], val_fraction: float, name: str) -> Sides:
    """Hold out the documents whose id lies below ``val_fraction`` of all ids; the smallest one where none does.

    A growing corpus moves nothing across (but that one smallest). DataError unless both sides have a document.
    """
    if not found:
        raise DataError(f"data.sources[{name}]: no document holds any text; give it others")
    unique = {document.number: document for document in reversed(found)}  # the first of equal ones stays
    limit = max(int(val_fraction * 2**64), min(unique) + 1)
    train = [document for document in found if unique[document.number] is document and document.number >= limit]
    val = sorted((each for each in unique.values() if each.number < limit), key=lambda each: each.number)
    if not train:
        raise DataError(
            f"data.sources[{name}]: {len(unique)} distinct documents, of which {len(val)} are held out at "
            f"data.val_fraction={val_fraction} and none is left to train on; add documents or lower val_fraction"
        )
    return Sides(train, val, len(found) - len(unique))


def reconcile(
    sides: Sequence[Sides], names: Sequence[str], shards_train: Sequence[Split], shards_val: Sequence[Split]
) -> list[Sides]:
    """Leave out of each source what would stand on both sides of the run: shards cannot change, so texts give way.

    A training document that anyone holds out goes; a held-out one that shards train on goes too.
    """
    held_out = {document.number for side in sides for document in side.val}
    held_out.update(_common(shards_val, [document.number for side in sides for document in side.train]))
    trained = _common(shards_train, [document.number for side in sides for document in side.val])
    clean = []
    for side, name in zip(sides, names, strict=True):
        train = [document for document in side.train if document.number not in held_out]
        val = [document for document in side.val if document.number not in trained]
        for kept, what, other in ((train, "training", "hold out"), (val, "held-out", "train on")):
            if not kept:
                raise DataError(
                    f"data.sources[{name}]: other sources {other} every one of its {what} documents; remove the source, or "
                    "build all with one val_fraction"
                )
        clean.append(Sides(train, val, side.dropped + len(side.train) + len(side.val) - len(train) - len(val)))
    return clean


def _common(splits: Sequence[Split], numbers: Sequence[int]) -> set[int]:
    """Which of these ids the splits hold too; their sidecars are read in chunks."""
    wanted: npt.NDArray[np.uint64] = np.array(numbers, dtype=np.uint64)
    found: set[int] = set()
    for split in splits:
        for _, ids in split.document_ids():
            found.update(wanted[np.isin(wanted, ids)].tolist())
    return found
