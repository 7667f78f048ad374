"""The step-0 proof: the batch a run begins with is what it should be, and so is the loss of untrained weights on it."""

import math
from collections.abc import Mapping, Sequence

from surefoot.config.data import Exclusion
from surefoot.config.model import Custom, ModelConfig
from surefoot.data.errors import DataError
from surefoot.data.health import prove_batch, prove_shares
from surefoot.data.loader import Batch, Loader
from surefoot.parallel.mesh import World

SLACK = 0.5
"""Nats that the loss of untrained weights may lie outside its expectation: a batch of a few hundred tokens scatters by a tenth of that."""


def prove_first_batch(batch: Batch, loader: Loader, exclusions: Sequence[Exclusion], world: World) -> None:
    """Check the batch that an attempt begins with against the files, by other code than the loader's. Raises DataError."""
    mistakes = prove_batch(batch, loader, exclusions, world.data_rank, world.data_size)
    if batch.batch_index == 0:
        mistakes += prove_shares(loader)
    if mistakes:
        more = f" (and {len(mistakes) - 1} more)" if len(mistakes) > 1 else ""
        raise DataError(
            f"the first batch is not what it should be: {mistakes[0]}{more}. Nothing was trained on it; "
            "`surefoot data inspect` shows the batch, and building the data again usually mends it"
        )


def initial_loss_band(model: ModelConfig) -> tuple[float, float]:
    """Lowest and highest loss, nats per token, to expect of weights as they are drawn.

    Normed hidden states have norm sqrt(D), so with N(0, std) outputs the logits scatter by sigma = std sqrt(D) and the loss is
    ln V + sigma^2 / 2. Tied embeddings also point at their own token, whose logit is D std: it adds exp(D std) to the normaliser.
    """
    width, std, vocabulary = model.d_model, model.init.std, model.vocab_size
    log_others = math.log(vocabulary) + std * std * width / 2
    log_own = width * std if model.tie_embeddings else -math.inf
    top = max(log_others, log_own)
    highest = top + math.log(sum(math.exp(part - top) for part in (log_others, log_own)))
    return math.log(vocabulary) - SLACK, highest + SLACK


def doubt_initial_loss(metrics: Mapping[str, float], model: ModelConfig) -> str:
    """A sentence when the loss of untrained weights is outside its band; empty when all is well or parts are custom."""
    loss = metrics.get("train/loss", math.nan)
    if not math.isfinite(loss) or any(isinstance(p, Custom) for p in (model.attention, model.feed_forward, model.norm)):
        return ""
    low, high = initial_loss_band(model)
    if low <= loss <= high:
        return ""
    return (
        f"the loss of untrained weights is {loss:.3f} nats per token, expected {low:.2f} to {high:.2f} (ln V = "
        f"{math.log(model.vocab_size):.3f}): a target leaks into its input, targets are misaligned, or the initialisation is off"
    )
