"""A whole config for tests of the codec: its numbers are in their expectations, so it is not a recipe that someone tunes."""

from surefoot.config.data import BpeTokenizer, DataConfig, PythonInstallation, SourceConfig
from surefoot.config.model import GroupedQueryAttention, ModelConfig, SwiGLU
from surefoot.config.optim import OptimConfig
from surefoot.config.run import RunConfig


def tiny() -> RunConfig:
    return RunConfig(
        recipe="tiny",
        steps=600,
        model=ModelConfig(
            vocab_size=4096,
            d_model=192,
            num_layers=4,
            attention=GroupedQueryAttention(num_heads=6, num_kv_heads=2, d_head=32),
            feed_forward=SwiGLU(d_ff=512),
        ),
        data=DataConfig(
            sources=(
                SourceConfig(name="code", documents=PythonInstallation(part="code"), weight=2.0),
                SourceConfig(name="prose", documents=PythonInstallation(part="prose"), weight=1.0),
            ),
            tokenizer=BpeTokenizer(vocab_size=4096),
            seq_len=256,
            batch_size=32,
        ),
        optim=OptimConfig(warmup_steps=60),
    )
