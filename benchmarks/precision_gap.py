"""What each precision costs in loss: the same small models trained under every policy, held-out loss against fp32.

    python benchmarks/precision_gap.py [--out runs/precision-gap] [--sizes 1m 10m] [--policies bf16 fp8-rowwise ...] [--seeds 3] [--jobs 1]
                                       [--steps 1m=200 10m=100] [--text corpora]

The same weights at the start, the same batches in the same order, the same steps: only the precision differs, so a gap is taken seed by seed
(policy less fp32, nats per token) and given with its spread over seeds. What a seed itself is worth is the spread of fp32. On a CPU fp16 and
fp8 are rounded operands, products accumulate in fp32; on a GPU they are the kernels. The guard only watches.
Finished runs are kept (one trial.json each under --out/trials), so the same command goes on; precision_gap.json and the table hold what is done.
"""

import argparse
import gzip
import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from surefoot.config.data import BpeTokenizer, DataConfig, PythonInstallation, SourceConfig, TextFiles
from surefoot.config.guard import GuardConfig
from surefoot.config.model import GroupedQueryAttention, LossConfig, ModelConfig, SwiGLU
from surefoot.config.optim import OptimConfig
from surefoot.config.parallel import Fp8Config, ParallelConfig
from surefoot.config.run import EvalConfig, LogConfig, RunConfig
from surefoot.monitor.durable import write_atomic
from surefoot.monitor.run import Run
from surefoot.scale.trials import Trial, TrialResult, run_trials

BASE = "fp32"
POLICIES: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "fp32"},
    "bf16": {"precision": "bf16"},
    "bf16_pure": {"precision": "bf16_pure"},
    "fp16": {"precision": "fp16"},
    "fp8-tensorwise": {"precision": "fp8", "fp8": Fp8Config(recipe="tensorwise")},
    "fp8-rowwise": {"precision": "fp8", "fp8": Fp8Config(recipe="rowwise")},
    "fp8-blockwise": {"precision": "fp8", "fp8": Fp8Config(recipe="blockwise")},
}
"""Settings of ``parallel`` by the name of a column."""
SIZES = {
    "1m": {"d_model": 128, "num_layers": 4, "num_heads": 4, "d_ff": 352, "lr": 3e-3},
    "10m": {"d_model": 320, "num_layers": 8, "num_heads": 5, "d_ff": 864, "lr": 1.5e-3},
}
STEPS = {"1m": 200, "10m": 100}
VOCAB_SIZE, ROWS, SEQ_LEN = 1024, 8, 256
BOOKS = "prose/classic_books.jsonl.gz"


def run_config(
    size: str, policy: str, seed: int, steps: int, documents: PythonInstallation | TextFiles, out: Path
) -> RunConfig:
    """One run; nothing but ``parallel`` knows of the policy."""
    shape = SIZES[size]
    heads = int(shape["num_heads"])
    return RunConfig(
        recipe="precision-gap",
        steps=steps,
        seed=seed,
        model=ModelConfig(
            vocab_size=VOCAB_SIZE,
            d_model=int(shape["d_model"]),
            num_layers=int(shape["num_layers"]),
            attention=GroupedQueryAttention(num_heads=heads, num_kv_heads=heads, d_head=int(shape["d_model"]) // heads),
            feed_forward=SwiGLU(d_ff=int(shape["d_ff"])),
            loss=LossConfig(chunk_tokens=1024),
        ),
        data=DataConfig(
            sources=(SourceConfig(name="text", documents=documents),),
            tokenizer=BpeTokenizer(vocab_size=VOCAB_SIZE),
            seq_len=SEQ_LEN,
            batch_size=ROWS,
            cache_dir=str(out / "data"),
        ),
        optim=OptimConfig(lr=shape["lr"], warmup_steps=min(40, max(1, steps // 5))),
        parallel=ParallelConfig(threads=1, **POLICIES[policy]),
        guard=GuardConfig(policy="observe", probe_every=0, snapshots=0),
        eval=EvalConfig(every=0, final_rows=256, batch_size=16),
        log=LogConfig(sample_tokens=0),
    )


def read_text(which: str, out: Path) -> PythonInstallation | TextFiles:
    """The Python installation, or the books of ``$SUREFOOT_CORPORA`` as one file a document."""
    if which == "python":
        return PythonInstallation(part="code")
    folder = out / "books"
    if not folder.exists():
        partial = out / ".books.part"
        partial.mkdir(parents=True, exist_ok=True)
        with gzip.open(Path(os.environ["SUREFOOT_CORPORA"]) / BOOKS, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines):
                (partial / f"{number:03d}.txt").write_text(json.loads(line)["text"], encoding="utf-8")
        partial.rename(folder)
    return TextFiles(glob=f"{folder}/*.txt")


def gaps(results: Mapping[tuple[str, str, int], TrialResult], out: Path) -> list[dict[str, Any]]:
    """Every size and policy of which some run is done: loss, and its gap to fp32 over the seeds that both have."""
    table = []
    for size, policy in dict.fromkeys((size, policy) for size, policy, _ in results):
        runs = {seed: r for (s, p, seed), r in results.items() if (s, p) == (size, policy)}
        base = {seed: r for (s, p, seed), r in results.items() if (s, p) == (size, BASE) and r.ending == "done"}
        done = {seed: r for seed, r in runs.items() if r.ending == "done"}
        gap = [done[seed].loss - base[seed].loss for seed in sorted(done.keys() & base.keys())]
        table.append(
            {
                "size": size,
                "policy": policy,
                "num_params": max((r.num_params for r in done.values()), default=0),
                "loss": {str(seed): round(r.loss, 5) for seed, r in sorted(done.items())},
                "spread": _spread([r.loss for r in done.values()]),
                "gap": [round(value, 5) for value in gap],
                "gap_mean": round(statistics.fmean(gap), 5) if gap else None,
                "gap_spread": _spread(gap),
                "overflows": max(
                    (_last(out / "trials" / r.name, "train/overflows") for r in done.values()), default=0.0
                ),
                "seconds": round(statistics.fmean(r.seconds for r in done.values()), 1) if done else None,
                "not_done": {str(seed): r.reason for seed, r in sorted(runs.items()) if r.ending != "done"},
            }
        )
    return table


def _spread(values: Sequence[float]) -> float | None:
    """Standard deviation over seeds; None for fewer than two."""
    return round(statistics.stdev(values), 5) if len(values) > 1 else None


def _last(folder: Path, name: str) -> float:
    """A metric in the last row of a run; 0 where it has none."""
    rows = Run(folder).rows
    return float(rows[-1].get(name, 0.0)) if rows else 0.0


def as_text(table: Sequence[dict[str, Any]]) -> str:
    """The table in Markdown."""
    lines = [
        "| size | policy | held-out loss | gap to fp32 | seeds | overflows | s a run |",
        "|---|---|---|---|---|---|---|",
    ]
    for line in table:
        losses = list(line["loss"].values())
        if not losses:
            lines.append(f"| {line['size']} | {line['policy']} | {'; '.join(line['not_done'].values())} | | 0 | | |")
            continue
        gap = "" if line["gap_mean"] is None else f"{line['gap_mean']:+.4f}{_plus_minus(line['gap_spread'])}"
        loss = f"{statistics.fmean(losses):.4f}{_plus_minus(line['spread'])}"
        figures = (
            line["size"],
            line["policy"],
            loss,
            gap,
            str(len(losses)),
            f"{line['overflows']:.0f}",
            f"{line['seconds']:.0f}",
        )
        lines.append(f"| {' | '.join(figures)} |")
    return "\n".join(lines)


def _plus_minus(spread: float | None) -> str:
    return "" if spread is None else f" ± {spread:.4f}"


def write(
    results: Mapping[tuple[str, str, int], TrialResult], args: argparse.Namespace, steps: Mapping[str, int]
) -> str:
    """The JSON of what is done; its table."""
    table = gaps(results, args.out)
    known = {
        "command": "python benchmarks/precision_gap.py " + " ".join(sys.argv[1:]),
        "data_fingerprint": next((r.data_fingerprint for r in results.values() if r.data_fingerprint), ""),
        "steps": dict(steps),
        "tokens_per_step": ROWS * SEQ_LEN,
        "table": table,
    }
    write_atomic(args.out / "precision_gap.json", json.dumps(known, indent=1, allow_nan=False) + "\n", sync=False)
    return as_text(table)


def main() -> None:
    """Runs what is missing, seed by seed, so that every policy has a figure early; then says and writes what is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/precision-gap"))
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", nargs="+", default=[], help="by size: 1m=200")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--text", choices=("python", "corpora"), default="python", help="corpora: of $SUREFOOT_CORPORA")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    steps = STEPS | {size: int(number) for size, _, number in (text.partition("=") for text in args.steps)}
    documents = read_text(args.text, args.out)
    policies = [BASE, *(policy for policy in args.policies if policy != BASE)]
    cells = [(size, policy, seed) for seed in range(args.seeds) for size in args.sizes for policy in policies]
    names = {f"{size},{policy},seed-{seed},{steps[size]}-steps": (size, policy, seed) for size, policy, seed in cells}
    trials = [
        Trial(name=name, config=run_config(size, policy, seed, steps[size], documents, args.out))
        for name, (size, policy, seed) in names.items()
    ]
    results: dict[tuple[str, str, int], TrialResult] = {}

    def done(result: TrialResult) -> None:
        results[names[result.name]] = result
        told = f"{result.loss:.4f}" if result.ending == "done" else result.reason
        print(
            f"[{len(results)}/{len(trials)}] {result.name}: {told}, {result.seconds:.0f} s", file=sys.stderr, flush=True
        )
        write(results, args, steps)

    run_trials(trials, args.out / "trials", jobs=args.jobs, on_done=done)
    print(write(results, args, steps))


if __name__ == "__main__":
    main()
