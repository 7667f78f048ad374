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
class PipelineConfig:
    """How the stages of a pipeline are cut and run, where ``parallel.pp`` is above 1."""

    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv", "dualpipev"] = "1f1b"
    """GPipe (arXiv:1811.06965); 1F1B and interleaved 1F1B (arXiv:2104.04473 section 2.2); interleaved zero bubble and ZBV
    (arXiv:2401.10241, arXiv:2405.15362); DualPipeV (DeepSeek-V3, arXiv:2412.19437 section 3.2.1, cut in half)."""
    stages_per_rank: int = 0
    """Stages on each rank; 0 is what the schedule is for: 1 under gpipe and 1f1b, else 2."""
    layers: tuple[int, ...] = ()
    """Layers of every stage, in order; empty shares them out evenly, the first stages taking what is left over."""


@dataclass(frozen=True, kw_only=True)
class NcclAxis:
    """What NCCL may take of a GPU for one axis's collectives. Nothing on a CPU."""

    max_ctas: int = 0
    """Most streaming multiprocessors that a collective of this axis runs on (NCCL's maxCTAs); 0 leaves it to NCCL."""
    high_priority: bool = False
    """Run on a high-priority stream."""


@dataclass(frozen=True, kw_only=True)
class NcclConfig:
    """Options of NCCL's communicators by axis."""

    data: NcclAxis = NcclAxis()
    """Gathering weights and reducing gradients."""
    cp: NcclAxis = NcclAxis()
    tp: NcclAxis = NcclAxis()
    pp: NcclAxis = NcclAxis()


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Layout, precision and compilation. The number of ranks comes from the launcher (torchrun); those that pp, cp and tp leave are
    data parallel."""

    data_parallel: Literal["ddp", "zero1", "zero2", "fsdp"] = "ddp"
    """What data-parallel ranks share out (arXiv:1910.02054): ddp nothing, each keeps a replica; zero1 moments and master weights; zero2
    gradients too, from micro-batch to micro-batch; fsdp (ZeRO-3) weights too, gathered block by block in forward and backward."""
    shard_size: int = 0
    """Data-parallel ranks that share one copy of the weights; fewer than there are is HSDP, replicas of shards. 0 is all."""
    tp: int = 1
    """Tensor parallel ranks (arXiv:1909.08053), with sequence parallel norms (arXiv:2205.05198) and a vocabulary-parallel loss."""
    pp: int = 1
    """Pipeline parallel ranks."""
    pipeline: PipelineConfig = PipelineConfig()
    cp: int = 1
    """Context parallel ranks, which share out the tokens of a row."""
    cp_attention: Literal["ring", "all_to_all"] = "ring"
    """How queries meet the keys of other ranks: keys and values go round (arXiv:2310.01889), or heads are exchanged for tokens
    (arXiv:2309.14509)."""
    recompute: Literal["none", "full", "selective"] = "none"
    """Activation checkpointing of every block: full keeps only its input, selective also the results of products with weights and of fused
    attention."""
    offload: bool = False
    """Keep master weights and moments in the host's memory and update there; needs zero1, zero2 or fsdp."""
    nccl: NcclConfig = NcclConfig()
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
