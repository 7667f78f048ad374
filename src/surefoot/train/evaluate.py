"""Held-out loss per domain, in nats per token and in bits per byte of text."""

import math
from dataclasses import dataclass

from surefoot.config.run import RunConfig
from surefoot.data.errors import DataError
from surefoot.data.loader import EvalRows, Loader
from surefoot.data.prepared import PreparedData
from surefoot.parallel.reduce import of_rows, sum_over_ranks
from surefoot.train.setup import Setup
from surefoot.train.step import on_device


@dataclass(frozen=True)
class TrainingData:
    """What a run reads: training batches, and the held-out rows of every domain."""

    prepared: PreparedData
    loader: Loader
    held_out: tuple[EvalRows, ...]

    @classmethod
    def open(cls, config: RunConfig, prepared: PreparedData) -> "TrainingData":
        """Raises DataError when the model has fewer rows of embedding than the tokenizer has ids."""
        if prepared.vocab_size > config.model.vocab_size:
            raise DataError(
                f"model.vocab_size={config.model.vocab_size} is below the tokenizer's {prepared.vocab_size} ids; "
                f"use --model.vocab_size {prepared.vocab_size}"
            )
        held_out = tuple(EvalRows(config.data, prepared, source) for source in range(len(prepared.sources)))
        return cls(prepared, Loader(config.data, prepared, config.seed), held_out)

    def tokens_before(self, batch_index: int) -> int:
        """Tokens that the batches before this one hold, padding and blanked ones included."""
        return self.loader.batch_starts.rows_of(batch_index)[0] * self.loader.data.seq_len


@dataclass(frozen=True)
class DomainLoss:
    """One domain's held-out rows."""

    loss: float
    """Cross-entropy, nats per predicted token."""
    bits_per_byte: float
    """A full code's length over the UTF-8 bytes of the text: first tokens of documents, which nothing predicts, cost ln(vocabulary)."""
    num_targets: int
    num_bytes: int


def evaluate(setup: Setup, held_out: EvalRows, num_rows: int) -> DomainLoss:
    """Loss of ``num_rows`` held-out rows of a domain, spread over all of them (0: all). Collective over ranks, which share the rows."""
    world = setup.world
    numbers = held_out.spread(num_rows)
    rows = len(numbers)
    size = setup.config.eval.batch_size
    nats = targets = firsts = num_bytes = 0.0
    stride = size * world.data_size
    for start in range(0, rows, stride):
        # Every rank runs every round, on rows of the first round where none is left, since a sharded forward is collective.
        begin = start + world.data_rank * size
        mine = held_out.take(numbers[begin : begin + size] if begin < rows else numbers[:1])
        (sums,) = setup.forward_backward.forward_only([on_device(mine.batch, setup)])
        if begin < rows:
            nats += float(sums.ce_sum)
            targets += mine.batch.num_targets
            firsts += float(mine.first_tokens_B.sum())
            num_bytes += float(mine.text_bytes_B.sum())
    told = of_rows([nats, targets, firsts, num_bytes], world)
    nats, targets, firsts, num_bytes = sum_over_ranks(told, world).tolist()
    code = nats + firsts * math.log(held_out.vocab_size)
    return DomainLoss(
        loss=nats / max(targets, 1.0),
        bits_per_byte=code / math.log(2) / max(num_bytes, 1.0),
        num_targets=round(targets),
        num_bytes=round(num_bytes),
    )


def cadence_metrics(setup: Setup, data: TrainingData) -> dict[str, float]:
    """The ``eval/*`` metrics of the cadence: ``eval.rows`` held-out rows of every domain, always the same ones."""
    metrics: dict[str, float] = {}
    for held_out in data.held_out:
        result = evaluate(setup, held_out, setup.config.eval.rows)
        metrics[f"eval/{held_out.name}/loss"] = result.loss
        metrics[f"eval/{held_out.name}/bits_per_byte"] = result.bits_per_byte
    return metrics
