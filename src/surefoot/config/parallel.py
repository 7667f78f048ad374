"""On what, and in which numbers, the model runs."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Layout, precision and compilation. The number of ranks comes from the launcher (torchrun)."""

    data_parallel: Literal["ddp", "fsdp"] = "ddp"
    """Several ranks: ddp keeps a replica on each, fsdp shards weights, gradients and moments (FSDP2)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto is the GPU where torch sees one."""
    precision: Literal["auto", "fp32", "bf16", "fp64"] = "auto"
    """Of the products; masters, moments, norms, softmax statistics and loss stay in fp32. auto times one product per dtype and writes its choice down."""
    micro_batch_size: int = 0
    """Rows per forward and backward on one rank; 0 is all of the rank's rows at once."""
    compile: Literal["auto", "on", "off"] = "off"
    """torch.compile of each block, in place; auto is off where there is no compiler, and says so."""
    threads: int = 0
    """CPU threads of one rank; 0 is all cores over the ranks on this machine."""
    timeout_s: float = 600.0
    """Seconds a collective may wait for a peer."""
