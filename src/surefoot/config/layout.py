"""How many ranks stand along each axis, and where a rank stands: arithmetic, no devices."""

from dataclasses import dataclass
from typing import NamedTuple

from surefoot.config.parallel import ParallelConfig


class Place(NamedTuple):
    """A rank's coordinates."""

    pp: int
    data: int
    cp: int
    tp: int


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Ranks along each axis. Neighbouring ranks differ in tp first, then in cp, in data, in pp."""

    pp: int = 1
    """Stages of the pipeline lie on so many ranks."""
    data: int = 1
    """Ranks, or groups of ranks, with rows of their own."""
    cp: int = 1
    """Ranks that share out the tokens of their rows."""
    tp: int = 1
    """Ranks that share out the columns and rows of matrices."""
    shard: int = 1
    """Of the data x cp ranks that would hold the same weights, so many neighbours hold a shard each; the rest is replicas of those."""

    @property
    def size(self) -> int:
        """All ranks."""
        return self.pp * self.data * self.cp * self.tp

    @property
    def replicate(self) -> int:
        """Replicas of each shard."""
        return self.data * self.cp // self.shard

    @property
    def row_ranks(self) -> tuple[int, ...]:
        """Of every part of a batch's rows the first rank that holds it."""
        return tuple(data * self.cp * self.tp for data in range(self.data))

    def place(self, rank: int) -> Place:
        """Where a rank stands."""
        rank, tp = divmod(rank, self.tp)
        rank, cp = divmod(rank, self.cp)
        pp, data = divmod(rank, self.data)
        return Place(pp, data, cp, tp)


def layout_of(parallel: ParallelConfig, world_size: int) -> Layout:
    """The layout of a config on so many ranks. The config must fit them (``layout_rules``): ValueError where it does not."""
    used = parallel.pp * parallel.cp * parallel.tp
    data, left = divmod(world_size, used)
    if left or data == 0:
        raise ValueError(
            f"{world_size} ranks do not divide over pp={parallel.pp} x cp={parallel.cp} x tp={parallel.tp}"
        )
    shard = 1 if parallel.data_parallel == "ddp" else (parallel.shard_size or data) * parallel.cp
    if data * parallel.cp % shard:
        raise ValueError(f"parallel.shard_size={parallel.shard_size} does not divide {data} data-parallel ranks")
    return Layout(pp=parallel.pp, data=data, cp=parallel.cp, tp=parallel.tp, shard=shard)


def in_words(parallel: ParallelConfig, layout: Layout) -> str:
    """The axes that have more than one rank, from the outermost: ``pp 2, 2 x fsdp 4, tp 2``."""
    data = f"{parallel.data_parallel} {layout.data}"
    if parallel.data_parallel != "ddp" and layout.replicate > 1:
        data = f"{layout.replicate} x {parallel.data_parallel} {layout.data // layout.replicate}"
    axes = (
        (layout.pp, f"pp {layout.pp}"),
        (layout.data, data),
        (layout.cp, f"cp {layout.cp}"),
        (layout.tp, f"tp {layout.tp}"),
    )
    return ", ".join(text for size, text in axes if size > 1)
