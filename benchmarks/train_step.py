"""Tokens per second of one whole training step against transformers' LlamaForCausalLM.

    python benchmarks/train_step.py [--sizes 1m 10m 30m] [--precisions bf16 fp32] [--rounds 5] [--threads 2] [--json FILE]

Same weights, data, batch and threads; forward, backward, global clipping and fused AdamW on both sides. The peer is the best of eager and
compiled (torch.compile of the whole model) with SDPA and, in bf16, autocast over fp32 weights, as its users run it. Variants take turns in
one process, a few steps each; the figure of a variant is its quickest turn, so that a busy machine hurts all alike.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from surefoot.config.data import DataConfig, SourceConfig, TextFiles
from surefoot.config.model import GroupedQueryAttention, LossConfig, ModelConfig, SwiGLU
from surefoot.config.optim import OptimConfig
from surefoot.config.parallel import ParallelConfig
from surefoot.config.run import RunConfig
from surefoot.data.loader import Batch
from surefoot.interop.huggingface import to_state
from surefoot.model.count import flops_per_token, num_params
from surefoot.parallel.device import peak_flops
from surefoot.parallel.mesh import World
from surefoot.train.setup import set_up
from surefoot.train.step import train_step

SIZES = {
    "1m": {"vocab_size": 1024, "d_model": 128, "num_layers": 4, "num_heads": 4, "d_ff": 352},
    "10m": {"vocab_size": 4096, "d_model": 320, "num_layers": 6, "num_heads": 5, "d_ff": 864},
    "30m": {"vocab_size": 8192, "d_model": 512, "num_layers": 8, "num_heads": 8, "d_ff": 1376},
}
ROWS, SEQ_LEN = 8, 256


def model_config(size: dict[str, int]) -> ModelConfig:
    heads = size["num_heads"]
    return ModelConfig(
        vocab_size=size["vocab_size"],
        d_model=size["d_model"],
        num_layers=size["num_layers"],
        attention=GroupedQueryAttention(num_heads=heads, num_kv_heads=heads, d_head=size["d_model"] // heads),
        feed_forward=SwiGLU(d_ff=size["d_ff"]),
        loss=LossConfig(chunk_tokens=1024),
    )


def run_config(model: ModelConfig, precision: str, compile: str) -> RunConfig:
    return RunConfig(
        recipe="benchmark",
        steps=10_000,
        determinism="fast",
        model=model,
        data=DataConfig(
            sources=(SourceConfig(name="x", documents=TextFiles(glob="-")),), seq_len=SEQ_LEN, batch_size=ROWS
        ),
        optim=OptimConfig(lr=1e-4, warmup_steps=1),
        parallel=ParallelConfig(device="cpu", precision=precision, compile=compile),  # type: ignore[arg-type]
    )


def fixed_batch(vocab_size: int) -> Batch:
    """One document a row, as the peer sees it."""
    stream = np.random.default_rng(0).integers(0, vocab_size, (ROWS, SEQ_LEN + 1))
    return Batch(
        batch_index=0,
        tokens_BT=np.ascontiguousarray(stream[:, :-1]),
        targets_BT=np.ascontiguousarray(stream[:, 1:]),
        documents_BT=np.zeros((ROWS, SEQ_LEN), dtype=np.int32),
        positions_BT=np.tile(np.arange(SEQ_LEN, dtype=np.int32), (ROWS, 1)),
        samples_B3=np.zeros((ROWS, 3), dtype=np.int64),
        digest="",
        num_targets=ROWS * SEQ_LEN,
        num_excluded=0,
        excluded=(),
    )


def ours(model: ModelConfig, precision: str, compile: str) -> tuple[Callable[[], float], dict[str, torch.Tensor]]:
    world = World(rank=0, size=1, device=torch.device("cpu"), mesh=None)
    setup, state = set_up(run_config(model, precision, compile), world)
    batch = fixed_batch(model.vocab_size)
    weights = {name: p.detach().clone() for name, p in state.model.named_parameters()}

    def step() -> float:
        return train_step(state, batch, setup).metrics["train/loss"]

    return step, weights


def peer(model: ModelConfig, precision: str, compiled: bool, weights: dict[str, torch.Tensor]) -> Callable[[], float]:
    attention = model.attention
    assert isinstance(attention, GroupedQueryAttention)
    assert isinstance(model.feed_forward, SwiGLU)
    config = LlamaConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.d_model,
        intermediate_size=model.feed_forward.d_ff,
        num_hidden_layers=model.num_layers,
        num_attention_heads=attention.num_heads,
        num_key_value_heads=attention.num_kv_heads,
        max_position_embeddings=SEQ_LEN,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
        use_cache=False,
    )
    network: Any = LlamaForCausalLM(config)
    network.load_state_dict(to_state(weights, model), strict=False)
    network.tie_weights()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    forward = torch.compile(network) if compiled else network
    batch = fixed_batch(model.vocab_size)
    tokens, targets = torch.from_numpy(batch.tokens_BT), torch.from_numpy(batch.targets_BT)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            loss = forward(input_ids=tokens, labels=tokens, shift_labels=targets).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        return float(loss)

    return step


def race(variants: dict[str, Callable[[], float]], rounds: int, steps: int) -> dict[str, float]:
    """Seconds per step of each variant: the quickest of its turns."""
    best = dict.fromkeys(variants, float("inf"))
    for step in variants.values():
        step(), step()
    for _ in range(rounds):
        for name, step in variants.items():
            begun = time.perf_counter()
            for _ in range(steps):
                step()
            best[name] = min(best[name], (time.perf_counter() - begun) / steps)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--precisions", nargs="+", default=["bf16", "fp32"], choices=["bf16", "fp32"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-compile", action="store_true", help="eager variants only")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results = []
    print(
        "size precision    params | tokens/s: ours eager  compiled | peer eager  compiled | best ours / best peer | of peak"
    )
    for name in args.sizes:
        model = model_config(SIZES[name])
        for precision in args.precisions:
            variants: dict[str, Callable[[], float]] = {}
            variants["ours"], weights = ours(model, precision, "off")
            variants["peer"] = peer(model, precision, False, weights)
            if not args.no_compile:
                variants["ours compiled"], _ = ours(model, precision, "on")
                variants["peer compiled"] = peer(model, precision, True, weights)
            first = {key: step() for key, step in variants.items()}
            spread = max(first.values()) - min(first.values())
            assert spread < 0.02, f"not the same model: first losses {first}"
            seconds = race(variants, args.rounds, {"1m": 10, "10m": 4, "30m": 2}[name])
            speed = {key: ROWS * SEQ_LEN / value for key, value in seconds.items()}
            mine = max(v for k, v in speed.items() if k.startswith("ours"))
            theirs = max(v for k, v in speed.items() if k.startswith("peer"))
            share = mine * flops_per_token(model, SEQ_LEN) / peak_flops(torch.device("cpu"), precision)  # type: ignore[arg-type]
            total = num_params(model).total
            print(
                f"{name:4} {precision:9} {total / 1e6:8.2f}M |       {speed['ours']:10,.0f} {speed.get('ours compiled', 0):9,.0f} |"
                f" {speed['peer']:10,.0f} {speed.get('peer compiled', 0):9,.0f} | {mine / theirs:21.2f} | {share:6.0%}",
                flush=True,
            )
            results.append(
                {
                    "size": name,
                    "precision": precision,
                    "params": total,
                    "speed": speed,
                    "ratio": mine / theirs,
                    "share_of_peak": share,
                }
            )
    if args.json:
        args.json.write_text(json.dumps({"threads": args.threads, "results": results}, indent=1))


if __name__ == "__main__":
    main()
