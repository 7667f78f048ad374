"""A run's model by itself: weights of a checkpoint and the tokenizer, for sampling."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from surefoot.config.codec import from_toml
from surefoot.config.errors import ConfigError
from surefoot.config.parallel import ParallelConfig
from surefoot.config.run import RunConfig
from surefoot.data.tokenizer import Tokenizer, load_tokenizer
from surefoot.guard.ledger import Checkpoint
from surefoot.model.transformer import Transformer
from surefoot.monitor.run import Run
from surefoot.parallel.precision import apply_precision, policy_of
from surefoot.train.checkpoint import verify
from surefoot.train.checkpoint_match import load_matching
from surefoot.train.generate import continue_tokens
from surefoot.train.manifest import CheckpointError


@dataclass(frozen=True)
class RestoredModel:
    """Weights on the CPU, ready to be asked."""

    config: RunConfig
    model: Transformer
    tokenizer: Tokenizer
    checkpoint: str

    def continue_text(self, prompt: str, num_tokens: int, *, temperature: float, top_k: int, seed: int) -> str:
        """Text that continues the prompt, until the end of a document or ``num_tokens``."""
        drawn = continue_tokens(
            self.model,
            self.tokenizer.encode(prompt),
            num_tokens,
            seq_len=self.config.data.seq_len,
            eos_id=self.tokenizer.eos_id,
            vocab_size=self.tokenizer.vocab_size,
            temperature=temperature,
            top_k=top_k,
            seed=seed,
        )
        return self.tokenizer.decode(drawn)


def open_model(folder: Path, step: int | None = None) -> RestoredModel:
    """The model of a run's newest good checkpoint, or of the one at ``step``.

    Raises ConfigError when there is none at that step, CheckpointError when none is good.
    """
    run = Run(folder)
    config = from_toml(RunConfig, folder / "config.toml")
    chosen = choose_checkpoint(run, step)
    parallel = _resolved(config.parallel)
    policy = policy_of(parallel)
    with torch.device("meta"):
        model = Transformer(config.model, policy.compute, policy.weights)
    apply_precision(model, parallel, torch.device("cpu"))
    model.to_empty(device="cpu")
    weights = {f"weights/{name}": p.detach() for name, p in model.named_parameters()}
    missing = load_matching(folder / "checkpoints" / chosen.name, weights)
    if missing:
        raise CheckpointError(f"{chosen.name} lacks {missing[0]}: it does not belong to {folder}/config.toml")
    path = folder / "tokenizer.json"
    tokenizer = load_tokenizer(config.data.tokenizer, path if path.exists() else None)
    return RestoredModel(config, model.eval(), tokenizer, chosen.name)


def _resolved(parallel: ParallelConfig) -> ParallelConfig:
    """With fp32 where nothing was ever decided."""
    return replace(parallel, precision="fp32") if parallel.precision == "auto" else parallel


def choose_checkpoint(run: Run, step: int | None = None) -> Checkpoint:
    """The newest checkpoint of the surviving run that verifies, or the one at a step. Raises ConfigError when there is none, CheckpointError when
    none is good."""
    there = [c for c in run.ledger.surviving_checkpoints() if (run.folder / "checkpoints" / c.name).is_dir()]
    wanted = [c for c in there if step is None or c.step == step]
    if not wanted:
        steps = ", ".join(str(c.step) for c in there) or "none yet"
        at = "" if step is None else f" at step {step}"
        raise ConfigError([f"{run.folder} has no checkpoint{at}; there are: {steps}"])
    problems: list[str] = []
    for checkpoint in reversed(wanted):
        problems = verify(run.folder / "checkpoints" / checkpoint.name)
        if not problems:
            return checkpoint
    raise CheckpointError(problems[0])
