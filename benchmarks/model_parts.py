"""Time of the model's parts against the obvious alternative, forward and backward: why attention and loss are written as they are.

    python benchmarks/model_parts.py [--dtype bfloat16] [--threads 1]

CPU time of the process, the least of several alternating tries, so that a busy machine shifts both sides alike.
"""

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from surefoot.model.attention_backends import AttentionBackend, EagerAttention, ScaledDotProduct
from surefoot.model.loss import next_token_loss
from surefoot.model.norm import RootMeanSquareNorm
from surefoot.model.rope import rotate, rotation

ROWS, TOKENS, VOCAB = 8, 256, 4096
# about the widths of a model of 1M, 10M and 30M parameters
SHAPES = {"1M": (128, 4, 4, 32), "10M": (320, 5, 5, 64), "30M": (512, 8, 8, 64), "30M grouped": (512, 8, 4, 64)}


def least(tries: int, *works: Callable[[], object]) -> list[float]:
    """Least CPU time of each, in milliseconds, taking turns."""
    best = [float("inf")] * len(works)
    for turn in range(tries + 1):
        for i, work in enumerate(works):
            start = time.process_time()
            work()
            if turn:
                best[i] = min(best[i], 1e3 * (time.process_time() - start))
    return best


def report(part: str, shape: str, ours: float, other: float, against: str) -> None:
    print(f"{part:24} {shape:12} {ours:8.2f} ms   {against:32} {other:8.2f} ms   ratio {other / ours:5.2f}", flush=True)


def attention(shape: str, dtype: torch.dtype, tries: int, documents: bool) -> None:
    _, heads, kv_heads, width = SHAPES[shape]
    q, k, v = (torch.randn(ROWS, TOKENS, n, width, dtype=dtype).requires_grad_() for n in (heads, kv_heads, kv_heads))
    grad = torch.randn(ROWS, TOKENS, heads, width, dtype=dtype)
    numbers = (torch.arange(TOKENS) // 100).int().expand(ROWS, TOKENS) if documents else None

    def work(backend: AttentionBackend) -> Callable[[], object]:
        mask = backend.prepare(numbers, q.flatten(2))
        return lambda: backend(q, k, v, mask).backward(grad)

    ours, other = least(tries, work(EagerAttention()), work(ScaledDotProduct()))
    report(
        "attention, documents" if documents else "attention, causal", shape, ours, other, "scaled_dot_product_attention"
    )


def loss(shape: str, dtype: torch.dtype, tries: int) -> None:
    hidden = torch.randn(ROWS, TOKENS, SHAPES[shape][0], dtype=dtype).requires_grad_()
    weight = (0.02 * torch.randn(VOCAB, SHAPES[shape][0])).requires_grad_()
    targets = torch.randint(0, VOCAB, (ROWS, TOKENS))

    def plain() -> None:
        logits = F.linear(hidden, weight.to(dtype)).float()
        F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").backward()

    def chunked() -> None:
        next_token_loss(hidden, weight, targets, z_loss=1e-4, chunk_tokens=2048).objective.backward()

    report("loss with z-loss", shape, *least(tries, chunked, plain), "linear, float, cross_entropy")


def small_parts(shape: str, dtype: torch.dtype, tries: int) -> None:
    width = SHAPES[shape][0]
    x = torch.randn(ROWS, TOKENS, width, dtype=dtype).requires_grad_()
    norm = RootMeanSquareNorm(width, 1e-5)
    torch.nn.init.ones_(norm.weight)

    def written_out(y: Tensor) -> Tensor:
        wide = y.float()
        return norm.weight.to(dtype) * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps)).to(dtype)

    times = least(tries, lambda: norm(x).sum().backward(), lambda: written_out(x).sum().backward())
    report("norm", shape, *times, "written out, as transformers does")

    _, heads, _, head_width = SHAPES[shape]
    q = torch.randn(ROWS, TOKENS, heads, head_width, dtype=dtype).requires_grad_()
    by = rotation(torch.arange(TOKENS).expand(ROWS, TOKENS), head_width, 1e4)
    cos, sin = (torch.cat((t, t), dim=-1).to(dtype) for t in by)

    def in_low_precision(y: Tensor) -> Tensor:
        first, second = y.chunk(2, dim=-1)
        return y * cos + torch.cat((-second, first), dim=-1) * sin

    times = least(tries, lambda: rotate(q, by).sum().backward(), lambda: in_low_precision(q).sum().backward())
    report("RoPE in fp32", shape, *times, "in the dtype of x, as transformers")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("bfloat16", "float32", "both"), default="both")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tries", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for name in ("bfloat16", "float32") if args.dtype == "both" else (args.dtype,):
        dtype = getattr(torch, name)
        print(f"{name}, {args.threads} thread(s), {ROWS} rows of {TOKENS} tokens, forward and backward")
        for shape in SHAPES:
            attention(shape, dtype, args.tries, documents=False)
            attention(shape, dtype, args.tries, documents=True)
            if shape != "30M grouped":
                loss(shape, dtype, args.tries)
                small_parts(shape, dtype, args.tries)


if __name__ == "__main__":
    main()
