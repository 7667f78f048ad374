"""A recipe made small: seconds on a CPU, and all that can go wrong still in it. For proofs."""

import dataclasses

from surefoot.config.data import BatchStage, BytesTokenizer, DataConfig, LengthStage, RepetitionMask
from surefoot.config.guard import GuardConfig
from surefoot.config.model import CompleteP, GroupedQueryAttention, ModelConfig, MuP, Standard, SwiGLU
from surefoot.config.optim import WSD, AdaGC, GlobalNorm, OptimConfig, Power, ZClip
from surefoot.config.parallel import ParallelConfig
from surefoot.config.run import BySteps, CheckpointConfig, EvalConfig, LogConfig, RunConfig

STEPS = 6
"""Of the schedule; a proof need not take them all."""
D_MODEL, NUM_LAYERS, NUM_HEADS, D_HEAD, D_FF = 32, 8, 8, 4, 48
"""8 layers are two stages on each of 4 pipeline ranks; 8 heads over 4 tensor ranks leave one key and value head each where they are grouped."""
GROUPED_KV_HEADS = 4
VOCAB_SIZE = 260
"""Every byte, the end of a document, and a few rows that no token has: 65 on each of 4 ranks."""
INIT_STD = 0.2
"""About what 0.02 is at a width of thousands: products keep the size of what goes in, and attention looks somewhere."""
SEQ_LEN, BATCH_SIZE = 64, 16
"""Two chunks on each of 4 context ranks; two rows on each of 8 data ranks, or 8 micro-batches of two on one."""
CLIP_NORM = 0.1
"""Below every gradient's norm, so that clipping is seen."""
QK_CLIP = 1e-2
"""Below the largest logit of most heads, likewise."""
WARMUP_STEPS = 2
"""Of the schedule, and of clipping with a memory."""


def shrink(config: RunConfig) -> RunConfig:
    """The config at a size where every layout of up to 8 ranks runs in seconds, on one CPU core each.

    What can go wrong is kept: tied or not, grouped heads or not, QK-norm, z-loss, document mask, parametrization with its ratios, kinds of
    optimiser, schedule and clipping (made to bite), ramps of batch and length, parts of the user's own (their builders read the small
    sizes). What says where and how fast the run is computed is not: the layout, device, cadences and bounds in time or tokens. Text is
    bytes; the sources stay what they are, for whoever has others to replace.
    """
    return dataclasses.replace(
        config,
        steps=STEPS,
        bound=BySteps(),
        model=_model(config.model),
        data=_data(config.data),
        optim=_optim(config.optim),
        parallel=ParallelConfig(
            device="cpu",
            threads=1,
            precision=config.parallel.precision,
            fp8=config.parallel.fp8,
            loss_scale=config.parallel.loss_scale,
            timeout_s=120.0,
        ),
        checkpoint=CheckpointConfig(every=1, keep_last=STEPS, asynchronous=False),
        guard=_guard(config.guard),
        eval=EvalConfig(every=2, rows=4, final_rows=4, batch_size=4),
        log=LogConfig(digest_every=1, sample_tokens=0, noise_every=2 if config.log.noise_every else 0, noise_pieces=2),
    )


def _model(model: ModelConfig) -> ModelConfig:
    attention, feed_forward = model.attention, model.feed_forward
    if isinstance(attention, GroupedQueryAttention):
        grouped = attention.num_kv_heads < attention.num_heads
        kv_heads = GROUPED_KV_HEADS if grouped else NUM_HEADS
        attention = dataclasses.replace(attention, num_heads=NUM_HEADS, num_kv_heads=kv_heads, d_head=D_HEAD)
    if isinstance(feed_forward, SwiGLU):
        feed_forward = SwiGLU(d_ff=D_FF)
    return dataclasses.replace(
        model,
        vocab_size=VOCAB_SIZE,
        d_model=D_MODEL,
        num_layers=NUM_LAYERS,
        attention=attention,
        feed_forward=feed_forward,
        parametrization=_parametrization(model),
        init=dataclasses.replace(model.init, std=INIT_STD),
        # more than one chunk of every stretch of tokens that a rank may hold
        loss=dataclasses.replace(model.loss, chunk_tokens=min(model.loss.chunk_tokens, 48)),
    )


def _parametrization(model: ModelConfig) -> Standard | MuP | CompleteP:
    """With the same ratios of sizes to base sizes, as nearly as whole numbers can."""
    kind = model.parametrization
    if isinstance(kind, Standard):
        return kind
    base_d_head = 0
    if kind.base_d_head and isinstance(model.attention, GroupedQueryAttention):
        base_d_head = max(2, round(D_HEAD * kind.base_d_head / model.attention.d_head / 2) * 2)
    base_d_model = _scaled(kind.base_d_model, D_MODEL, model.d_model)
    if isinstance(kind, MuP):
        return MuP(base_d_model=base_d_model, base_d_head=base_d_head)
    base_num_layers = _scaled(kind.base_num_layers, NUM_LAYERS, model.num_layers)
    return dataclasses.replace(
        kind, base_d_model=base_d_model, base_d_head=base_d_head, base_num_layers=base_num_layers
    )


def _guard(guard: GuardConfig) -> GuardConfig:
    """The first update of so small a model is large beside its weights, and that is no alarm."""
    thresholds = dataclasses.replace(guard.thresholds, update_share=1e6)
    return dataclasses.replace(guard, thresholds=thresholds, snapshots=0, probe_every=2)


def _scaled(base: int, small: int, large: int) -> int:
    return max(1, round(base * small / large))


def _data(data: DataConfig) -> DataConfig:
    """One step of each ramp is kept, at the second batch."""
    repetition = data.repetition
    if isinstance(repetition, RepetitionMask):
        repetition = RepetitionMask(max_period=min(repetition.max_period, 4), count=min(repetition.count, 8))
    return dataclasses.replace(
        data,
        tokenizer=BytesTokenizer(),
        seq_len=SEQ_LEN,
        batch_size=BATCH_SIZE,
        length_stages=(LengthStage(start_batch=0, seq_len=SEQ_LEN // 2), LengthStage(start_batch=1, seq_len=SEQ_LEN))
        if data.length_stages
        else (),
        batch_stages=(BatchStage(start_batch=1, batch_size=2 * BATCH_SIZE),) if data.batch_stages else (),
        mixture_stages=tuple(dataclasses.replace(s, start_row=n + 1) for n, s in enumerate(data.mixture_stages)),
        val_fraction=0.2,
        repetition=repetition,
        exclude=(),
    )


def _optim(optim: OptimConfig) -> OptimConfig:
    schedule, clipping = optim.schedule, optim.clipping
    if isinstance(schedule, WSD) and schedule.decay_steps:
        schedule = dataclasses.replace(schedule, decay_steps=1)
    if isinstance(schedule, Power):
        schedule = dataclasses.replace(schedule, peak_steps=0)
    if isinstance(clipping, ZClip | AdaGC):
        clipping = dataclasses.replace(clipping, warmup_steps=WARMUP_STEPS)
    if isinstance(clipping, ZClip):
        clipping = dataclasses.replace(clipping, z_threshold=0.1)
    # beside the hard cap nothing that a running norm allows would be seen
    cap = CLIP_NORM if isinstance(clipping, GlobalNorm) else 100 * CLIP_NORM
    return dataclasses.replace(
        optim,
        schedule=schedule,
        clipping=clipping,
        warmup_steps=min(optim.warmup_steps, WARMUP_STEPS),
        clip_norm=min(optim.clip_norm, cap),
        qk_clip=min(optim.qk_clip, QK_CLIP),
    )
