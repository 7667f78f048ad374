"""How much a wrong learning rate costs, with and without QK-norm, after short and long warm-ups: Wortsman et al., arXiv:2309.14322.

    python benchmarks/lr_sensitivity.py [--out runs/lr-sensitivity] [--jobs 1] [--seeds 3] [--precision fp32] [--text python]

Their LR sensitivity (section 2.2) is the mean over learning rates of min(loss, loss at the start) less the best loss: how much is lost where
the rate is not the best one. 0.86M parameters, bytes, 200 steps of 2,048 tokens, no decay of weights, clipping at 1, constant rate after the
warm-up. Asked: does QK-norm at least halve it, and does a longer warm-up lower it. The guard only watches: an update it refused would hide what
is measured. Finished runs are kept, so the same command goes on; --runs N stops after N more. Writes lr_sensitivity.json and .svg.
"""

import argparse
import dataclasses
import functools
import gzip
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from surefoot.config.data import BytesTokenizer, DataConfig, PythonInstallation, SourceConfig, TextFiles
from surefoot.config.guard import GuardConfig
from surefoot.config.model import GroupedQueryAttention, ModelConfig, SwiGLU
from surefoot.config.optim import AdamW, Constant, OptimConfig
from surefoot.config.parallel import ParallelConfig
from surefoot.config.run import EvalConfig, LogConfig, RunConfig
from surefoot.monitor.durable import write_atomic
from surefoot.monitor.run import Run
from surefoot.scale.loss_charts import COLOURS, Axis, Dot, Series, loss_chart
from surefoot.scale.trials import Trial, TrialResult, run_trials

RATES = (1e-3, 1e-2, 3e-2, 1e-1)
WARMUPS = (1, 50, 150)
WARMUP = 50
"""At which QK-norm is judged."""
STEPS, ROWS, SEQ_LEN = 200, 16, 128
CORPUS_BYTES = 8 << 20
HALF = 0.5


def run_config(
    lr: float, warmup: int, qk_norm: bool, seed: int, precision: str, documents: PythonInstallation | TextFiles
) -> RunConfig:
    """One run: the model of arXiv:2309.14322 made small, without the things that would cure it."""
    return RunConfig(
        recipe="lr-sensitivity",
        steps=STEPS,
        seed=seed,
        model=ModelConfig(
            vocab_size=257,
            d_model=128,
            num_layers=4,
            attention=GroupedQueryAttention(num_heads=4, num_kv_heads=4, d_head=32, qk_norm=qk_norm),
            feed_forward=SwiGLU(d_ff=344),
            tie_embeddings=False,
        ),
        data=DataConfig(
            sources=(SourceConfig(name="text", documents=documents),),
            tokenizer=BytesTokenizer(),
            seq_len=SEQ_LEN,
            batch_size=ROWS,
            cache_dir="runs/.data",
        ),
        optim=OptimConfig(
            optimizer=AdamW(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0),
            lr=lr,
            warmup_steps=warmup,
            schedule=Constant(),
            clip_norm=1.0,
        ),
        parallel=ParallelConfig(device="cpu", precision=precision, threads=1),  # type: ignore[arg-type]
        guard=GuardConfig(policy="observe", probe_every=50, snapshots=0),
        eval=EvalConfig(every=0, final_rows=512, batch_size=32),
        log=LogConfig(sample_tokens=0),
    )


@dataclasses.dataclass(frozen=True)
class Setup:
    """What a sensitivity is taken of."""

    qk_norm: bool
    warmup: int

    @property
    def name(self) -> str:
        """Beginning of its trials' names."""
        return f"qk-norm-{'on' if self.qk_norm else 'off'},warmup-{self.warmup}"


SETUPS = (
    Setup(False, WARMUP),
    Setup(True, WARMUP),
    Setup(False, 1),
    Setup(False, 150),
    Setup(True, 1),
    Setup(True, 150),
)
"""In the order in which the questions are answered."""


def trials(
    seeds: Sequence[int], precision: str, documents: PythonInstallation | TextFiles
) -> list[tuple[Setup, Trial]]:
    """Every run: the first questions for all seeds, then the rest."""
    listed = []
    for setups in (SETUPS[:2], SETUPS[2:4], SETUPS[4:]):
        for seed in seeds:
            for setup in setups:
                for lr in RATES:
                    config = run_config(lr, setup.warmup, setup.qk_norm, seed, precision, documents)
                    listed.append((setup, Trial(name=f"{setup.name},lr-{lr:g},seed-{seed}", config=config)))
    return listed


def sensitivity(results: Sequence[TrialResult]) -> float:
    """Mean over learning rates of min(loss, loss at the start) less the best of them (arXiv:2309.14322 section 2.2)."""
    losses = [result.bounded_loss for result in results]
    return statistics.fmean(losses) - min(losses)


def by_setup(
    listed: Sequence[tuple[Setup, Trial]], results: Sequence[TrialResult], folder: Path
) -> list[dict[str, Any]]:
    """Sensitivity of every setup over the seeds all of whose runs are done, and the losses it is made of."""
    found = {result.name: result for result in results if result.ending != "failed"}
    table = []
    for setup in SETUPS:
        seeds: dict[int, list[TrialResult]] = {}
        for of, trial in listed:
            if of == setup and trial.name in found:
                seeds.setdefault(trial.config.seed, []).append(found[trial.name])
        whole = {seed: runs for seed, runs in seeds.items() if len(runs) == len(RATES)}
        values = {seed: sensitivity(runs) for seed, runs in whole.items()}
        if not whole:
            continue
        table.append(
            {
                "qk_norm": setup.qk_norm,
                "warmup": setup.warmup,
                "sensitivity": {str(seed): round(value, 4) for seed, value in values.items()},
                "mean": round(statistics.fmean(values.values()), 4),
                "runs": [
                    {"seed": seed, "lr": lr, **facts(run, folder)}
                    for seed, runs in whole.items()
                    for lr, run in zip(RATES, runs, strict=True)
                ],
            }
        )
    return table


def facts(run: TrialResult, folder: Path) -> dict[str, Any]:
    """Of one run, for the JSON."""
    return {
        "loss": round(run.loss, 4) if math.isfinite(run.loss) else None,
        "initial_loss": round(run.initial_loss, 4),
        "bounded_loss": round(run.bounded_loss, 4),
        "ending": run.ending,
        "reason": run.reason,
        "attention_logit_max": largest_logit(folder / run.name),
        "seconds": run.seconds,
    }


@functools.cache
def largest_logit(folder: Path) -> float | None:
    """Of the last probe, over layers."""
    for row in reversed(Run(folder).rows):
        values = [
            value for name, value in row.items() if name.endswith("/attention_logit_max") and name.startswith("inside/")
        ]
        if values:
            return float(f"{max(map(float, values)):.4g}")
    return None


def verdicts(table: Sequence[dict[str, Any]]) -> list[str]:
    """The two questions, answered as far as there are runs."""
    mean = {(line["qk_norm"], line["warmup"]): line for line in table}
    told = []
    off, on = mean.get((False, WARMUP)), mean.get((True, WARMUP))
    if off and on:
        seeds = sorted(off["sensitivity"].keys() & on["sensitivity"].keys())
        ratios = [on["sensitivity"][seed] / off["sensitivity"][seed] for seed in seeds]
        ratio = on["mean"] / off["mean"]
        answer = "at least halves" if ratio <= HALF else "does not halve"
        told.append(
            f"QK-norm {answer} LR sensitivity: {off['mean']:.3f} without, {on['mean']:.3f} with (x{ratio:.2f}; "
            f"by seed x{', x'.join(f'{r:.2f}' for r in ratios)})"
        )
    for qk_norm in (False, True):
        lines = [mean[qk_norm, warmup] for warmup in WARMUPS if (qk_norm, warmup) in mean]
        if len(lines) < len(WARMUPS):
            continue
        means = [line["mean"] for line in lines]
        falls = means == sorted(means, reverse=True) and means[0] > means[-1]
        seeds = sorted(set.intersection(*(set(line["sensitivity"]) for line in lines)))
        lower = sum(lines[-1]["sensitivity"][seed] < lines[0]["sensitivity"][seed] for seed in seeds)
        told.append(
            f"{'With' if qk_norm else 'Without'} QK-norm a longer warm-up {'lowers' if falls else 'does not steadily lower'} it: "
            + ", ".join(f"{line['mean']:.3f} after {line['warmup']}" for line in lines)
            + f" steps; {WARMUPS[-1]} below {WARMUPS[0]} for {lower} of {len(seeds)} seeds"
        )
    return told


def picture(table: Sequence[dict[str, Any]]) -> str:
    """Two panels side by side: QK-norm, and warm-up without it."""
    by_norm = [line for line in table if line["warmup"] == WARMUP]
    by_warmup = sorted((line for line in table if not line["qk_norm"]), key=lambda line: line["warmup"])
    panels = [
        ("QK-norm, warm-up of 50 steps", {"with QK-norm" if line["qk_norm"] else "without": line for line in by_norm}),
        ("warm-up, without QK-norm", {f"{line['warmup']} steps": line for line in by_warmup}),
    ]
    axis = Axis(label="learning rate", scale="log", ticks=[(lr, f"{lr:g}") for lr in RATES])
    parts = []
    for place, (title, lines) in enumerate(panels):
        if not lines:
            continue
        chart = loss_chart(
            [_series(name, line["runs"]) for name, line in lines.items()],
            axis,
            title=title,
            y_label="loss, or that at the start if lower",
        )
        names = "".join(
            f'<tspan fill="{COLOURS[n]}">● {name} ({line["mean"]:.3f})   </tspan>'
            for n, (name, line) in enumerate(lines.items())
        )
        parts.append(f'<svg x="{530 * place}" y="40" width="520" height="280">{chart}</svg>')
        parts.append(f'<text x="{530 * place + 52}" y="18" font-weight="600">{title}</text>')
        parts.append(f'<text x="{530 * place + 52}" y="34">{names}</text>')
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1060 325" width="1060" height="325" font-family="system-ui, sans-serif" font-size="12">'
        f'<rect width="100%" height="100%" fill="#ffffff"/>{"".join(parts)}</svg>\n'
    )


def _series(name: str, runs: Sequence[dict[str, Any]]) -> Series:
    return Series(
        name=name,
        dots=[Dot(x=run["lr"], y=run["bounded_loss"], hover=f"{run['loss']}, seed {run['seed']}") for run in runs],
        line=[(lr, statistics.fmean(run["bounded_loss"] for run in runs if run["lr"] == lr)) for lr in RATES],
    )


def write_texts(corpora: Path, folder: Path) -> TextFiles:
    """Documents of the corpora's code and prose, up to 8 MiB of each, as files of their own."""
    if not folder.exists():
        partial = folder.with_name(f".{folder.name}.part")
        partial.mkdir(parents=True, exist_ok=True)
        for domain in ("code", "prose"):
            written = number = 0
            for archive in sorted((corpora / domain).glob("*.gz")):
                with gzip.open(archive, "rt", encoding="utf-8") as lines:
                    for line in lines:
                        if written > CORPUS_BYTES:
                            break
                        text = json.loads(line)["text"]
                        (partial / f"{domain}-{number:06d}.txt").write_text(text, encoding="utf-8")
                        written, number = written + len(text), number + 1
        partial.rename(folder)
    return TextFiles(glob=f"{folder}/*.txt")


def main() -> None:
    """Runs what is missing, then says and writes what is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/lr-sensitivity"))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--runs", type=int, default=0, help="of the list, the first so many; 0 is all")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--text", choices=("python", "corpora"), default="python", help="corpora: of $SUREFOOT_CORPORA")
    args = parser.parse_args()
    documents: PythonInstallation | TextFiles = PythonInstallation(part="code")
    if args.text == "corpora":
        documents = write_texts(Path(os.environ["SUREFOOT_CORPORA"]), args.out / "texts")
    listed = trials(range(args.seeds), args.precision, documents)
    wanted = listed[: args.runs or None]
    begun, results = time.monotonic(), []

    def done(result: TrialResult) -> None:
        results.append(result)
        told = (
            f"{result.loss:.4f} (at the start {result.initial_loss:.3f})" if result.ending == "done" else result.reason
        )
        print(
            f"[{len(results)}/{len(wanted)}] {result.name}: {told}, {result.seconds:.0f} s", file=sys.stderr, flush=True
        )
        write(listed, results, args)

    run_trials([trial for _, trial in wanted], args.out / "trials", jobs=args.jobs, on_done=done)
    for line in write(listed, results, args):
        print(line)
    print(f"{args.out}/lr_sensitivity.json, lr_sensitivity.svg ({time.monotonic() - begun:.0f} s)")


def write(listed: Sequence[tuple[Setup, Trial]], results: Sequence[TrialResult], args: argparse.Namespace) -> list[str]:
    """The JSON and the picture of what is done; the verdicts."""
    table = by_setup(listed, results, args.out / "trials")
    told = verdicts(table)
    known = {
        "source": "arXiv:2309.14322",
        "command": f"python benchmarks/lr_sensitivity.py --seeds {args.seeds} --precision {args.precision} --text {args.text}",
        "precision": args.precision,
        "num_params": max((result.num_params for result in results), default=0),
        "data_fingerprint": next((result.data_fingerprint for result in results if result.data_fingerprint), ""),
        "rates": RATES,
        "steps": STEPS,
        "tokens_per_step": ROWS * SEQ_LEN,
        "verdicts": told,
        "setups": table,
    }
    write_atomic(args.out / "lr_sensitivity.json", json.dumps(known, indent=1, allow_nan=False) + "\n", sync=False)
    write_atomic(args.out / "lr_sensitivity.svg", picture(table), sync=False)
    return told


if __name__ == "__main__":
    main()
