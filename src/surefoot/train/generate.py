"""Text from a model: one token after another, each draw seeded."""

from collections.abc import Sequence

import torch
from torch import nn

from surefoot.parallel.context import on_whole_rows
from surefoot.parallel.forward_backward import reshard


@torch.no_grad()
def continue_tokens(
    forward: nn.Module,
    prompt: Sequence[int],
    num_tokens: int,
    *,
    seq_len: int,
    eos_id: int,
    vocab_size: int = 0,
    temperature: float = 0.8,
    top_k: int = 0,
    seed: int = 0,
    device: torch.device | None = None,
) -> list[int]:
    """Token ids that continue ``prompt`` (not repeated), until the end of the document or ``num_tokens``.

    Each token sees the last ``seq_len`` tokens. ``temperature`` 0 takes the likeliest; ``top_k`` 0 draws from all. The draw of token i
    is seeded by (seed, i). ``vocab_size``, when given, keeps rows of the embedding beyond the tokenizer's ids from being drawn. Under sharding every rank must call it, and gets the same tokens.
    Raises ValueError for an empty prompt: nothing was trained to predict a first token.
    """
    if not prompt:
        raise ValueError("the prompt has no token; give some text to continue")
    tokens = list(prompt)
    for index in range(num_tokens):
        window, last = _window(tokens, seq_len, fixed=device is not None and device.type == "cuda")
        window = window.to(device)
        positions = torch.arange(window.shape[1], dtype=torch.int32, device=device)[None]
        documents = torch.zeros_like(positions)
        with on_whole_rows(forward):
            logits = forward(window, positions, documents)[0, last].float().cpu()[: vocab_size or None]
        token = _draw(logits, temperature, top_k, seed * 1_000_003 + index)
        if token == eos_id:
            break
        tokens.append(token)
    reshard(forward)
    return tokens[len(prompt) :]


def _window(tokens: Sequence[int], seq_len: int, *, fixed: bool) -> tuple[torch.Tensor, int]:
    """The last tokens as one row, and the place of the newest. ``fixed``: padded behind it to seq_len, which changes nothing before it,
    so that kernels compiled for one length serve all."""
    seen = list(tokens[-seq_len:])
    padding = [0] * (seq_len - len(seen)) if fixed else []
    return torch.tensor([seen + padding], dtype=torch.int64), len(seen) - 1


def _draw(logits: torch.Tensor, temperature: float, top_k: int, seed: int) -> int:
    if temperature <= 0:
        return int(logits.argmax())
    if 0 < top_k < logits.numel():
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], float("-inf"))
    probabilities = torch.softmax(logits / temperature, dim=-1)
    generator = torch.Generator().manual_seed(seed)
    return int(torch.multinomial(probabilities, 1, generator=generator))
