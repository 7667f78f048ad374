"""The range of every number in a config, by dotted key."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Bound:
    """An interval and how it is said."""

    words: str
    low: float = -math.inf
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False

    def holds(self, value: float) -> bool:
        """Whether a value lies inside; what is not finite never does."""
        if not math.isfinite(value):
            return False
        above = value > self.low if self.low_open else value >= self.low
        below = value < self.high if self.high_open else value <= self.high
        return above and below


AT_LEAST_1 = Bound("at least 1", low=1)
AT_LEAST_2 = Bound("at least 2", low=2)
AT_LEAST_0 = Bound("at least 0", low=0)
ABOVE_0 = Bound("above 0", low=0, low_open=True)
SHARE = Bound("from 0 to 1", low=0, high=1)
PART = Bound("above 0 and at most 1", low=0, high=1, low_open=True)
PROPER_PART = Bound("above 0 and below 1", low=0, high=1, low_open=True, high_open=True)
DECAY = Bound("at least 0 and below 1", low=0, high=1, high_open=True)
SEED = Bound("from 0 to 2**63 - 1", low=0, high=2**63 - 1)
BPE_SIZE = Bound("at least 257: every byte and the end of a document", low=257)

BOUNDS: Mapping[str, Bound] = {
    "steps": AT_LEAST_1,
    "bound.tokens": ABOVE_0,
    "bound.flops": ABOVE_0,
    "bound.hours": ABOVE_0,
    "bound.money": ABOVE_0,
    "bound.price_per_hour": ABOVE_0,
    "seed": SEED,
    "model.vocab_size": AT_LEAST_1,
    "model.d_model": AT_LEAST_1,
    "model.num_layers": AT_LEAST_1,
    "model.attention.num_heads": AT_LEAST_1,
    "model.attention.num_kv_heads": AT_LEAST_1,
    "model.attention.d_head": Bound("at least 2", low=2),
    "model.attention.rope_theta": ABOVE_0,
    "model.feed_forward.d_ff": AT_LEAST_1,
    "model.norm.eps": ABOVE_0,
    "model.init.std": ABOVE_0,
    "model.init.truncate": AT_LEAST_0,
    "model.embedding_gradient": PART,
    "model.embedding_multiplier": ABOVE_0,
    "model.logit_multiplier": ABOVE_0,
    "model.parametrization.base_d_model": AT_LEAST_1,
    "model.parametrization.base_d_head": AT_LEAST_0,
    "model.parametrization.base_num_layers": AT_LEAST_1,
    "model.parametrization.alpha": Bound("from 0.5 to 1", low=0.5, high=1),
    "model.loss.z_loss": AT_LEAST_0,
    "model.loss.chunk_tokens": AT_LEAST_1,
    "data.sources.*.weight": ABOVE_0,
    "data.tokenizer.vocab_size": BPE_SIZE,
    "data.seq_len": AT_LEAST_1,
    "data.batch_size": AT_LEAST_1,
    "data.batch_stages.*.start_batch": AT_LEAST_1,
    "data.batch_stages.*.batch_size": AT_LEAST_1,
    "data.length_stages.*.start_batch": AT_LEAST_0,
    "data.length_stages.*.seq_len": AT_LEAST_1,
    "data.mixture_stages.*.start_row": AT_LEAST_1,
    "data.mixture_stages.*.weights.*": ABOVE_0,
    "data.val_fraction": PROPER_PART,
    "data.repetition.max_period": AT_LEAST_1,
    "data.repetition.count": AT_LEAST_2,
    "data.exclude.*.from_batch": AT_LEAST_0,
    "optim.optimizer.beta1": DECAY,
    "optim.optimizer.beta2": DECAY,
    "optim.optimizer.eps": ABOVE_0,
    "optim.optimizer.weight_decay": AT_LEAST_0,
    "optim.optimizer.momentum": DECAY,
    "optim.optimizer.newton_schulz_steps": AT_LEAST_1,
    "optim.optimizer.others.beta1": DECAY,
    "optim.optimizer.others.beta2": DECAY,
    "optim.optimizer.others.eps": ABOVE_0,
    "optim.optimizer.others.weight_decay": AT_LEAST_0,
    "optim.lr": ABOVE_0,
    **{
        f"optim.roles.{role}.{setting}": bound
        for role in ("embedding", "hidden", "output", "norm", "bias", "router", "expert", "latent")
        for setting, bound in (("lr", ABOVE_0), ("decay", AT_LEAST_0), ("eps", ABOVE_0))
    },
    "optim.qk_clip": AT_LEAST_0,
    "optim.schedule.exponent": ABOVE_0,
    "optim.schedule.peak_steps": AT_LEAST_0,
    "optim.schedule.decay_steps": AT_LEAST_0,
    "optim.schedule.min_ratio": SHARE,
    "optim.schedule.decay_fraction": PART,
    "optim.warmup_steps": AT_LEAST_0,
    "optim.clip_norm": AT_LEAST_0,
    "optim.clipping.alpha": DECAY,
    "optim.clipping.z_threshold": ABOVE_0,
    "optim.clipping.ratio": AT_LEAST_1,
    "optim.clipping.beta": DECAY,
    "optim.clipping.warmup_steps": AT_LEAST_2,
    "parallel.shard_size": AT_LEAST_0,
    "parallel.tp": AT_LEAST_1,
    "parallel.pp": AT_LEAST_1,
    "parallel.pipeline.stages_per_rank": AT_LEAST_0,
    "parallel.pipeline.layers.*": AT_LEAST_1,
    "parallel.cp": AT_LEAST_1,
    "parallel.nccl.data.max_ctas": AT_LEAST_0,
    "parallel.nccl.cp.max_ctas": AT_LEAST_0,
    "parallel.nccl.tp.max_ctas": AT_LEAST_0,
    "parallel.nccl.pp.max_ctas": AT_LEAST_0,
    "parallel.micro_batch_size": AT_LEAST_0,
    "parallel.fp8.high_first_blocks": AT_LEAST_0,
    "parallel.fp8.high_last_blocks": AT_LEAST_0,
    "parallel.loss_scale.initial": ABOVE_0,
    "parallel.loss_scale.growth_every": AT_LEAST_1,
    "parallel.loss_scale.smallest": ABOVE_0,
    "parallel.threads": AT_LEAST_0,
    "parallel.timeout_s": ABOVE_0,
    "guard.thresholds.loss_sigmas": ABOVE_0,
    "guard.thresholds.loss_nats": AT_LEAST_0,
    "guard.thresholds.document_sigmas": ABOVE_0,
    "guard.thresholds.document_nats": AT_LEAST_0,
    "guard.thresholds.gradient_sigmas": ABOVE_0,
    "guard.thresholds.gradient_ratio": AT_LEAST_1,
    "guard.thresholds.clip_sigmas": ABOVE_0,
    "guard.thresholds.update_ratio": AT_LEAST_1,
    "guard.thresholds.update_share": ABOVE_0,
    "guard.thresholds.slow_nats": ABOVE_0,
    "guard.thresholds.slow_steps": AT_LEAST_1,
    "guard.thresholds.logit_warning": ABOVE_0,
    "guard.thresholds.logit_ruin": ABOVE_0,
    "guard.max_consecutive_skips": AT_LEAST_1,
    "guard.max_data_skips": AT_LEAST_1,
    "guard.max_rejections": AT_LEAST_1,
    "guard.max_rollbacks": AT_LEAST_0,
    "guard.max_exclusions": AT_LEAST_0,
    "guard.max_lr_events": AT_LEAST_0,
    "guard.max_investigations": AT_LEAST_0,
    "guard.cooldown": AT_LEAST_0,
    "guard.probe_every": AT_LEAST_0,
    "guard.probe_rows": AT_LEAST_1,
    "guard.snapshots": AT_LEAST_0,
    "guard.snapshot_every": AT_LEAST_1,
    "guard.snapshot_budget_gib": ABOVE_0,
    "guard.certify_after": AT_LEAST_0,
    "checkpoint.every": AT_LEAST_0,
    "checkpoint.keep_last": AT_LEAST_1,
    "checkpoint.keep_every": AT_LEAST_0,
    "eval.every": AT_LEAST_0,
    "eval.rows": AT_LEAST_0,
    "eval.final_rows": AT_LEAST_0,
    "eval.batch_size": AT_LEAST_1,
    "log.print_every": AT_LEAST_1,
    "log.digest_every": AT_LEAST_0,
    "log.noise_every": AT_LEAST_0,
    "log.noise_pieces": AT_LEAST_2,
    "log.sample_tokens": AT_LEAST_0,
}
"""``*`` is any item of a list. A test holds that every number of the config stands here."""


def numbers(value: Any, key: str) -> Iterator[tuple[str, str, float]]:
    """Key, key with ``*`` for items, and value of every number in a part of a config, free tables left out."""
    yield from _numbers(value, key, key)


def _numbers(value: Any, key: str, pattern: str) -> Iterator[tuple[str, str, float]]:
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _numbers(getattr(value, field.name), f"{key}.{field.name}", f"{pattern}.{field.name}")
    elif isinstance(value, tuple):
        for n, item in enumerate(value):
            yield from _numbers(item, f"{key}.{n}", f"{pattern}.*")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield key, pattern, value


def out_of_range(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Key and sentence of every number outside its range."""
    for at, pattern, number in numbers(value, key):
        bound = BOUNDS.get(pattern)
        if bound is not None and not bound.holds(number):
            yield at, f"{at}={number!r} must be {bound.words}"
