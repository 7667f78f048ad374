"""Which tokens of a row lie on which context parallel rank, and how what is known of them comes together again."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed.distributed_c10d import GroupName

from surefoot.model.loss import LossSums
from surefoot.parallel.forward_backward import MicroBatch


def group_of(name: str) -> dist.ProcessGroup:
    """The group of that name. Raises RuntimeError where there is none."""
    return _resolve_process_group(GroupName(name))


@dataclass(frozen=True)
class Pieces:
    """Rows cut into equal chunks, dealt out over the ranks that share these rows."""

    group_name: str
    """Of the ranks that share rows; torch knows groups by name, and a process that ends while one is held aborts."""
    rank: int
    """Of this one among them."""
    size: int
    balanced: bool
    """Each rank has two chunks, one from the front and its mirror image from the back, so that causality leaves all the same amount of
    attention (arXiv:2407.21783 section 3.3.2); otherwise one, in order."""

    @property
    def group(self) -> dist.ProcessGroup:
        """For collectives among them."""
        return group_of(self.group_name)

    @property
    def num_chunks(self) -> int:
        """Of a row."""
        return 2 * self.size if self.balanced else self.size

    def chunks(self, rank: int) -> tuple[int, ...]:
        """A rank's chunks of a row, in the order in which they lie there."""
        return (rank, 2 * self.size - 1 - rank) if self.balanced else (rank,)

    def mine(self, x_BT: Tensor) -> Tensor:
        """This rank's tokens (B, T/cp, ...) of whole rows (B, T, ...). Raises ValueError where rows cannot be cut so."""
        if x_BT.shape[1] % self.num_chunks:
            raise ValueError(
                f"rows of {x_BT.shape[1]} tokens do not divide into {self.num_chunks} chunks for {self.size} context parallel ranks"
            )
        chunks = x_BT.chunk(self.num_chunks, dim=1)
        return torch.cat([chunks[number] for number in self.chunks(self.rank)], dim=1)

    @torch.no_grad()
    def whole(self, x_BT: Tensor) -> Tensor:
        """(B, T, ...) in the order of the row from every rank's (B, T/cp, ...), without gradient. Collective; the same bits on all ranks."""
        everyone = [torch.empty_like(x_BT, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(everyone, x_BT.contiguous(), group=self.group)
        return self.in_order(everyone)

    def in_order(self, everyone: Sequence[Tensor]) -> Tensor:
        """(B, T, ...) in the order of the row from (B, T/cp, ...) of each rank."""
        places = [chunk for rank in range(self.size) for chunk in self.chunks(rank)]
        pieces = [piece for x_BT in everyone for piece in x_BT.chunk(self.num_chunks // self.size, dim=1)]
        return torch.cat([pieces[places.index(number)] for number in range(self.num_chunks)], dim=1)


class SharedRows:
    """Rows whose tokens lie over ranks: cut for the model, and their sums put together again."""

    def __init__(self, pieces: Pieces) -> None:
        self.pieces = pieces

    def mine(self, micro: MicroBatch) -> MicroBatch:
        """This rank's tokens, positions and targets; documents whole, for a token's keys are everywhere."""
        cut = self.pieces.mine
        return MicroBatch(cut(micro.tokens_BT), cut(micro.positions_BT), micro.documents_BT, cut(micro.targets_BT))

    def whole_tokens(self, x_BT: Tensor) -> Tensor:
        """What is known of every token of a row, (B, T, ...), from this rank's (B, T/cp, ...), without gradient. Collective."""
        return self.pieces.whole(x_BT)

    @torch.no_grad()
    def whole(self, sums: Sequence[LossSums]) -> list[LossSums]:
        """One gather for all micro-batches: every rank adds the same numbers in the same order, and NaN is not lost in a maximum."""
        if not sums:
            return []
        scalars = [torch.stack([s.objective, s.ce_sum, s.z_sum, s.lse_sum, s.lse_max]) for s in sums]
        losses = [s.token_losses_BT for s in sums]
        mine = torch.cat([x.detach().reshape(-1) for x in (*scalars, *losses)])
        everyone = [torch.empty_like(mine) for _ in range(self.pieces.size)]
        dist.all_gather(everyone, mine, group=self.pieces.group)
        sizes = [5] * len(sums) + [x.numel() for x in losses]
        of_ranks = [torch.split(x, sizes) for x in everyone]
        found = []
        for at, own in enumerate(sums):
            numbers_R5 = torch.stack([parts[at] for parts in of_ranks])
            objective, ce_sum, z_sum, lse_sum = numbers_R5[:, :4].sum(0).unbind()
            token_losses = [parts[len(sums) + at].view_as(own.token_losses_BT) for parts in of_ranks]
            lse_max = numbers_R5[:, 4].amax()
            found.append(LossSums(objective, ce_sum, z_sum, lse_sum, lse_max, self.pieces.in_order(token_losses)))
        return found
