"""A model of about two million parameters and text that every machine has: minutes on two cores."""

from surefoot.config.data import BpeTokenizer, DataConfig, PythonInstallation, SourceConfig
from surefoot.config.model import GroupedQueryAttention, ModelConfig, SwiGLU
from surefoot.config.optim import WSD, OptimConfig
from surefoot.config.run import CheckpointConfig, EvalConfig, RunConfig


def tiny() -> RunConfig:
    """The Python installation in two domains, code and prose, by a small Llama-style decoder.

    Small batches and a long decay: of the settings tried (docs/lab/LAB.md, 2026-11-30) these learn most from two and a half million tokens.
    """
    return RunConfig(
        recipe="tiny",
        steps=1100,
        model=ModelConfig(
            vocab_size=4096,
            d_model=192,
            num_layers=3,
            attention=GroupedQueryAttention(num_heads=6, num_kv_heads=2, d_head=32),
            feed_forward=SwiGLU(d_ff=512),
        ),
        data=DataConfig(
            sources=(
                SourceConfig(name="code", documents=PythonInstallation(part="code"), weight=1.5),
                SourceConfig(name="prose", documents=PythonInstallation(part="prose"), weight=1.0),
            ),
            tokenizer=BpeTokenizer(vocab_size=4096),
            seq_len=256,
            batch_size=8,
        ),
        optim=OptimConfig(lr=3e-3, warmup_steps=150, schedule=WSD(decay_fraction=0.4)),
        checkpoint=CheckpointConfig(every=200, keep_every=400),
        eval=EvalConfig(every=100, rows=32),
    )
