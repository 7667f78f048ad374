"""On what, and in which numbers, the model runs."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Fp8Config:
    """What ``precision = "fp8"`` means. Embedding, output, norms, softmax and routers always stay high."""

    recipe: Literal["tensorwise", "rowwise", "blockwise"] = "rowwise"
    """One scale per tensor; per row and column (arXiv:2209.05433 with dynamic scales); or per 1x128 piece of activations and gradients and
    per 128x128 block of weights, all in e4m3 (DeepSeek-V3, arXiv:2412.19437 section 3.3.2)."""
    high: tuple[str, ...] = ()
    """Products kept in bf16: pieces of module names, as in ``attention.output``, ``down``."""
    high_first_blocks: int = 0
    """First blocks kept in bf16."""
    high_last_blocks: int = 0
    """Last blocks kept in bf16."""


@dataclass(frozen=True, kw_only=True)
class LossScaleConfig:
    """The factor on the loss that keeps small fp16 gradients above zero (arXiv:1710.03740 section 3.2)."""

    initial: float = 65536.0
    """Of the first step; too large costs a few skipped steps, each of which halves it."""
    growth_every: int = 2000
    """Steps without an overflow after which it doubles."""
    smallest: float = 1.0
    """Down here an overflow is a fault like any other."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Layout, precision and compilation. The number of ranks comes from the launcher (torchrun)."""

    data_parallel: Literal["ddp", "fsdp"] = "ddp"
    """Several ranks: ddp keeps a replica on each, fsdp shards weights, gradients and moments (FSDP2)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto is the GPU where torch sees one."""
    precision: Literal["auto", "fp32", "bf16", "bf16_pure", "fp16", "fp8", "fp64"] = "auto"
    """Of the products; masters, moments, norms, softmax statistics and loss stay in fp32, but bf16_pure keeps weights in bf16, rounded
    stochastically. auto times one product per dtype, fp32 and bf16, and writes its choice down. fp16 and fp8 are rounded operands on a CPU."""
    fp8: Fp8Config = Fp8Config()
    loss_scale: LossScaleConfig = LossScaleConfig()
    micro_batch_size: int = 0
    """Rows per forward and backward on one rank; 0 is all of the rank's rows at once."""
    compile: Literal["auto", "on", "off"] = "off"
    """torch.compile of each block, in place; auto is off where there is no compiler, and says so."""
    threads: int = 0
    """CPU threads of one rank; 0 is all cores over the ranks on this machine."""
    timeout_s: float = 600.0
    """Seconds a collective may wait for a peer."""
