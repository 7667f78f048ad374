"""What only a GPU can show; `make device-check`, in one call of a few minutes. Prints its figures for docs/lab/LAB.md."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from surefoot.config.model import GroupedQueryAttention, ModelConfig, SwiGLU
from surefoot.config.run import RunConfig
from surefoot.model.attention_backends import choose_backend
from surefoot.model.parametrization import initialise
from surefoot.model.transformer import Transformer
from surefoot.monitor.compare import compare
from surefoot.monitor.run import Run
from surefoot.parallel.device import measured_flops, published_flops
from surefoot.parallel.mesh import join_world
from surefoot.proof.rehearsal import Script, rehearse
from surefoot.train.dry_run import random_batch
from surefoot.train.setup import set_up
from surefoot.train.step import train_step

pytestmark = [
    pytest.mark.device,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]

BF16_BACKENDS = 2e-2
"""Logits of flex against eager attention in bf16: both round scores and weights."""


def on_gpu(config: RunConfig, vary: Callable[..., RunConfig], precision: str) -> RunConfig:
    wide = GroupedQueryAttention(num_heads=4, num_kv_heads=2, d_head=32)
    model = {"model.d_model": 128, "model.attention": wide, "model.feed_forward": SwiGLU(d_ff=256)}
    return vary(config, **{"parallel.device": "cuda", "parallel.precision": precision}, **model)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_strict_runs_on_a_gpu_are_the_same_run_and_skip_and_resume(
    config: RunConfig, vary: Callable[..., RunConfig], tmp_path: Path, precision: str
) -> None:
    config = on_gpu(config, vary, precision)
    script = Script(nan_batches=(6,), rollback_after=17, rollback_to=14)
    one = rehearse(config, tmp_path / "one", script)
    rehearse(config, tmp_path / "two", Script(nan_batches=(6,), stop_after=11))
    two = rehearse(config, tmp_path / "two", script)
    assert one.digests == two.digests
    assert compare(Run(tmp_path / "one"), Run(tmp_path / "two")).same


def test_flex_attention_masks_documents_as_eager_attention_does() -> None:
    model = ModelConfig(
        vocab_size=256,
        d_model=128,
        num_layers=2,
        attention=GroupedQueryAttention(num_heads=4, num_kv_heads=2, d_head=32),
        feed_forward=SwiGLU(d_ff=256),
    )
    network = Transformer(model, torch.bfloat16)
    initialise(network, model, seed=0)
    network.to("cuda")
    tokens = torch.randint(0, 256, (2, 256), device="cuda")
    positions = torch.arange(256, device="cuda").expand(2, 256)
    documents = (positions // 100).int()
    assert type(choose_backend("auto", tokens.device, torch.bfloat16, documents=True)).__name__ == "FlexAttention"
    logits = {}
    for name in ("flex", "eager"):
        object.__setattr__(network.cfg, "attention_backend", name)
        logits[name] = network(tokens, positions, documents).detach()
    assert float((logits["flex"] - logits["eager"]).norm() / logits["eager"].norm()) < BF16_BACKENDS


def test_figures(config: RunConfig, vary: Callable[..., RunConfig], capsys: pytest.CaptureFixture[str]) -> None:
    """Peak against the data sheet, and tokens per second of a small model, eager and compiled."""
    device = torch.device("cuda")
    name = torch.cuda.get_device_name(device)
    lines = [name]
    for precision in ("bf16", "fp32"):
        sheet = published_flops(name, precision)
        lines.append(
            f"{precision}: measured {measured_flops(device, precision) / 1e12:.0f} TFLOP/s, data sheet {(sheet or 0) / 1e12:.0f}"
        )  # type: ignore[arg-type]
    for choice in ("off", "on"):
        wide = vary(on_gpu(config, vary, "bf16"), determinism="fast")
        wide = vary(wide, **{"model.d_model": 1024, "model.num_layers": 8, "model.feed_forward": SwiGLU(d_ff=2816)})
        heads = GroupedQueryAttention(num_heads=16, num_kv_heads=8, d_head=64)
        wide = vary(
            wide, **{"model.attention": heads, "data.seq_len": 1024, "data.batch_size": 16, "parallel.compile": choice}
        )
        setup, state = set_up(wide, join_world(wide.parallel, strict=False))
        batch = random_batch(setup)
        for _ in range(5):
            train_step(state, batch, setup)
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(20):
            train_step(state, batch, setup)
        torch.cuda.synchronize()
        rate = 20 * 16 * 1024 / (time.perf_counter() - begun)
        lines.append(f"compile {choice}: {rate:,.0f} tokens/s, {rate * setup.flops_per_token / 1e12:.0f} TFLOP/s")
    with capsys.disabled():
        print("\n" + "\n".join(lines))
