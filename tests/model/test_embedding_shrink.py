"""The embedding gets a share of its gradient as an input; values and every other gradient keep their bits."""

import dataclasses

import pytest
import torch

from surefoot.config.model import GroupedQueryAttention, LossConfig, ModelConfig, SwiGLU
from surefoot.model.loss import LossSums
from surefoot.model.parametrization import initialise
from surefoot.model.transformer import Transformer
from tolerances import ONE_ROUNDING

CONFIG = ModelConfig(
    vocab_size=17,
    d_model=16,
    num_layers=2,
    attention=GroupedQueryAttention(num_heads=2, num_kv_heads=1, d_head=8),
    feed_forward=SwiGLU(d_ff=24),
)


def gradients(cfg: ModelConfig, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model = Transformer(cfg, dtype)
    initialise(model, cfg, seed=3)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(17, (2, 12), generator=generator)
    targets = torch.randint(17, (2, 12), generator=generator)
    sums = model(tokens, torch.arange(12).expand(2, 12), None, targets)
    assert isinstance(sums, LossSums)
    sums.objective.backward()
    return sums.ce_sum, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_values_keep_their_bits_and_only_the_embedding_gradient_shrinks(dtype: torch.dtype) -> None:
    untied = dataclasses.replace(CONFIG, tie_embeddings=False)
    loss, whole = gradients(untied, dtype)
    shrunk_loss, shrunk = gradients(dataclasses.replace(untied, embedding_gradient=0.1), dtype)
    assert torch.equal(loss, shrunk_loss)
    for name, gradient in whole.items():
        if name != "embedding.weight":
            assert torch.equal(shrunk[name], gradient), name
    error = shrunk["embedding.weight"] - 0.1 * whole["embedding.weight"]
    assert error.norm() <= ONE_ROUNDING[whole["embedding.weight"].dtype] * whole["embedding.weight"].norm()
    assert whole["embedding.weight"].norm() > 0


def test_of_a_tied_embedding_only_the_input_path_shrinks() -> None:
    """The gradient is affine in the share, and what the share does not multiply is the gradient of the output."""
    by_share = {
        share: gradients(dataclasses.replace(CONFIG, embedding_gradient=share))[1]["embedding.weight"]
        for share in (1.0, 0.5, 0.1)
    }
    from_input = 2 * (by_share[1.0] - by_share[0.5])
    from_output = by_share[1.0] - from_input
    expected = from_output + 0.1 * from_input
    assert (by_share[0.1] - expected).norm() <= ONE_ROUNDING[torch.float64] * 10 * expected.norm()
    assert from_output.norm() > 0.1 * by_share[1.0].norm()
    assert from_input.norm() > 0.1 * by_share[1.0].norm()


def test_cures_are_off_unless_asked_for() -> None:
    assert CONFIG.embedding_gradient == 1.0
    assert LossConfig().z_loss == 0.0
    assert isinstance(CONFIG.attention, GroupedQueryAttention)
    assert not CONFIG.attention.qk_norm


def test_evaluation_without_gradients_still_works() -> None:
    model = Transformer(dataclasses.replace(CONFIG, embedding_gradient=0.1), torch.float32)
    initialise(model, CONFIG, seed=3)
    with torch.no_grad():
        assert model(torch.zeros(1, 4, dtype=torch.int64), torch.arange(4)[None], None).shape == (1, 4, 17)
