"""Precision policies with a GPU's own kernels: fp8 by torchao against the operands that any processor rounds, fp16 and bf16_pure runs."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from surefoot.config.model import GroupedQueryAttention, SwiGLU
from surefoot.config.parallel import Fp8Config
from surefoot.config.run import RunConfig
from surefoot.monitor.run import Run
from surefoot.parallel.fp8 import check_device, gpu_product
from surefoot.parallel.rounded import Recipe, fp8_product
from surefoot.proof.rehearsal import Script, rehearse

pytestmark = [
    pytest.mark.device,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]

FP8_KERNELS = 1e-2
"""Kernels and rounded operands in bf16: the same fp8 values, other accumulation."""
RECIPES: list[Recipe] = ["tensorwise", "rowwise", "blockwise"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_kernels_multiply_the_operands_that_are_rounded_elsewhere(recipe: Recipe) -> None:
    pytest.importorskip("torchao")
    device = torch.device("cuda")
    check_device(recipe, device)
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(4, 256, 512, device=device, dtype=torch.bfloat16, generator=generator)
    w = torch.randn(384, 512, device=device, generator=generator) * 0.02
    g = torch.randn(4, 256, 384, device=device, dtype=torch.bfloat16, generator=generator)
    found = []
    for product in (gpu_product(recipe), fp8_product(recipe)):
        inputs = x.clone().requires_grad_(), w.clone().requires_grad_()
        out = product(*inputs)
        out.backward(g)
        found.append([out.detach(), *(i.grad for i in inputs if i.grad is not None)])
    for kernel, rounded in zip(*found, strict=True):
        assert float((kernel.float() - rounded.float()).norm() / rounded.float().norm()) < FP8_KERNELS


@pytest.mark.parametrize("precision", ["fp16", "bf16_pure", *RECIPES])
def test_a_run_learns_and_resumes_to_the_bit(
    config: RunConfig, vary: Callable[..., RunConfig], tmp_path: Path, precision: str
) -> None:
    if precision in RECIPES:
        pytest.importorskip("torchao")
        policy = {"parallel.precision": "fp8", "parallel.fp8": Fp8Config(recipe=precision)}  # type: ignore[arg-type]
    else:
        policy = {"parallel.precision": precision}
    wide = GroupedQueryAttention(num_heads=4, num_kv_heads=4, d_head=32)
    model = {"model.d_model": 128, "model.attention": wide, "model.feed_forward": SwiGLU(d_ff=256)}
    config = vary(config, **{"parallel.device": "cuda"}, **policy, **model)
    one = rehearse(config, tmp_path / "one")
    rehearse(config, tmp_path / "two", Script(stop_after=11))
    assert one.digests == rehearse(config, tmp_path / "two").digests
    rows = Run(tmp_path / "one").joined_rows
    assert rows[-1]["train/loss"] < rows[0]["train/loss"] - 1
