"""A run of seconds that does everything a run can do: skips, rolls back, excludes, checkpoints. For proofs and tests."""

import random
from pathlib import Path

from surefoot.config.data import BytesTokenizer, DataConfig, SourceConfig, TextFiles
from surefoot.config.guard import GuardConfig
from surefoot.config.model import GroupedQueryAttention, ModelConfig, SwiGLU
from surefoot.config.optim import Cosine, OptimConfig
from surefoot.config.parallel import ParallelConfig
from surefoot.config.run import CheckpointConfig, EvalConfig, LogConfig, RunConfig
from surefoot.data.loader import Loader
from surefoot.guard.actions import Rollback
from surefoot.guard.guard import GuardState, Judge, Verdict, judge
from surefoot.guard.signals import StepSignals
from surefoot.train.keeping import Keeping

WORDS = (
    "the step holds when the ground moves and what was lost is counted before it is mended so that a run which fell "
    "stands where it would have stood had it never fallen and every row it read is read once and none is read twice"
).split()


def write_corpus(folder: Path, *, documents: int = 40, seed: int = 0) -> None:
    """Small texts of our own in two domains, ``<folder>/calm`` and ``<folder>/busy``; the same bytes for the same seed."""
    draw = random.Random(seed)
    for domain, length in (("calm", 60), ("busy", 25)):
        (folder / domain).mkdir(parents=True, exist_ok=True)
        for number in range(documents):
            text = " ".join(draw.choice(WORDS) for _ in range(length + draw.randrange(length)))
            (folder / domain / f"{number:04d}.txt").write_text(f"{domain} {number}. {text}.\n")


def rehearsal(corpus: Path, cache: Path, *, steps: int = 24, precision: str = "fp32") -> RunConfig:
    """The config of a run on ``write_corpus``'s texts: about 20 thousand parameters, bytes as tokens."""
    domains = ("calm", "busy")
    return RunConfig(
        recipe="rehearsal",
        steps=steps,
        seed=7,
        model=ModelConfig(
            vocab_size=257,
            d_model=32,
            num_layers=2,
            attention=GroupedQueryAttention(num_heads=4, num_kv_heads=2, d_head=8),
            feed_forward=SwiGLU(d_ff=48),
        ),
        data=DataConfig(
            sources=tuple(
                SourceConfig(name=d, documents=TextFiles(glob=f"{corpus}/{d}/*.txt"), weight=w)
                for d, w in zip(domains, (2.0, 1.0), strict=True)
            ),
            tokenizer=BytesTokenizer(),
            seq_len=64,
            batch_size=4,
            cache_dir=str(cache),
        ),
        optim=OptimConfig(lr=3e-3, schedule=Cosine(), warmup_steps=4),
        parallel=ParallelConfig(device="cpu", precision=precision, threads=1),  # type: ignore[arg-type]
        guard=GuardConfig(snapshots=2, snapshot_every=4, certify_after=4),
        checkpoint=CheckpointConfig(every=5, keep_last=3),
        eval=EvalConfig(every=10, rows=4, batch_size=4),
        log=LogConfig(sample_tokens=0),
    )


def scripted_judge(keeping: Keeping, loader: Loader, *, at_batch: int, to_batch: int) -> Judge:
    """The guard's own judge, and once a rollback: after batch ``at_batch``, to ``to_batch``, without the documents of that batch's first row."""

    def decide(state: GuardState, signals: StepSignals, config: GuardConfig) -> Verdict:
        verdict = judge(state, signals, config)
        rolled_back = any(a.reason == "rollback" for a in keeping.ledger.attempts)
        if signals.batch_index != at_batch or rolled_back:
            return verdict
        source, _, row = loader.sample_ids(at_batch)[0].tolist()
        documents = tuple(sorted({span.document for span in loader.row_documents(source, row)}))
        action = Rollback(to_batch=to_batch, exclude=documents, cause="rehearsed: the first row of this batch is declared bad")
        return Verdict(state=verdict.state, findings=("rehearsed rollback",), action=action)

    return decide

