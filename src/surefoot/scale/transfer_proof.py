"""The published transfer sweep: bytes of real books, widths 64 to 512 and depths 2 to 16, under mup, completep and standard.

``python -m surefoot.scale.transfer_proof --out docs/proof/transfer --docs docs`` runs what is missing and writes docs/transfer.md and
docs/transfer.svg from the cells. The text is found through ``$SUREFOOT_CORPORA``.
"""

import argparse
import gzip
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from surefoot.config.data import BytesTokenizer, DataConfig, SourceConfig, TextFiles
from surefoot.config.model import GroupedQueryAttention, InitConfig, ModelConfig, SwiGLU
from surefoot.config.optim import AdamW, Linear, OptimConfig
from surefoot.config.parallel import ParallelConfig
from surefoot.config.run import EvalConfig, RunConfig
from surefoot.scale.transfer import Plan, around, run_plan
from surefoot.scale.transfer_cells import Cell, Size, read_cells, write_cell
from surefoot.scale.transfer_page import write_docs
from surefoot.scale.trials import TrialResult

BOOKS = "prose/classic_books.jsonl.gz"
COMMAND = "python -m surefoot.scale.transfer_proof"
WORK = Path("runs/transfer-proof")
WIDTHS = (64, 128, 256, 512)
DEPTHS = (2, 4, 8, 16)
SEEDS = (0, 1, 2)


def recipe(books: Path, cache: Path) -> RunConfig:
    """The base: two layers of width 64, half a million bytes, one epoch."""
    return RunConfig(
        recipe="transfer",
        steps=480,
        determinism="fast",
        model=ModelConfig(
            vocab_size=257,
            d_model=64,
            num_layers=2,
            attention=GroupedQueryAttention(num_heads=4, num_kv_heads=2, d_head=16),
            feed_forward=SwiGLU(d_ff=128),
            tie_embeddings=False,
            init=InitConfig(std=0.03, depth_scaled=False),
        ),
        data=DataConfig(
            sources=(SourceConfig(name="prose", documents=TextFiles(glob=f"{books}/*.txt")),),
            tokenizer=BytesTokenizer(),
            seq_len=128,
            batch_size=8,
            cache_dir=str(cache),
        ),
        optim=OptimConfig(optimizer=AdamW(weight_decay=0.1), warmup_steps=48, schedule=Linear()),
        parallel=ParallelConfig(precision="bf16", device="cpu"),
        eval=EvalConfig(every=0, final_rows=384),
    )


def plan(base: RunConfig) -> Plan:
    """Five rates, three at width 512 and at depth 16, centred where a first look found the optimum; grids grow where their edge is the best."""
    grids = {Size("standard", 64, 2): around(0.008, 2)}
    for width, centre in ((128, 0.004), (256, 0.002), (512, 0.001)):
        side = 1 if width == 512 else 2
        grids[Size("mup", width, 2)] = around(0.008, side)
        grids[Size("standard", width, 2)] = around(centre, side)
    for depth, centre in ((4, 0.008), (8, 0.004), (16, 0.004)):
        side = 1 if depth == 16 else 2
        grids[Size("completep", 64, depth)] = around(0.008, side)
        grids[Size("standard", 64, depth)] = around(centre, side)
    return Plan(
        base=base, widths=WIDTHS, depths=DEPTHS, lrs=around(0.008, 2), grids=grids, seeds=SEEDS, command=COMMAND
    )


def unpack(corpora: Path, folder: Path) -> Path:
    """The books as files of text, one a document; what is there is kept."""
    folder.mkdir(parents=True, exist_ok=True)
    with gzip.open(corpora / BOOKS, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            path = folder / f"{number:03d}.txt"
            if not path.exists():
                path.write_text(json.loads(line)["text"], encoding="utf-8")
    return folder


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what is missing, then writes the docs; 1 when a run failed."""
    parser = argparse.ArgumentParser(prog=COMMAND, allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True, help="folder of the cells, one file each")
    parser.add_argument("--docs", type=Path, help="folder for transfer.md and transfer.svg")
    parser.add_argument("--work", type=Path, default=WORK, help="run folders, text and shards (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args(argv)
    failures: list[str] = []
    corpora = os.environ.get("SUREFOOT_CORPORA", "")
    if not (Path(corpora) / BOOKS).is_file():
        print(
            f"$SUREFOOT_CORPORA={corpora!r} holds no {BOOKS}; point it at the real text for experiments",
            file=sys.stderr,
        )
        return 3
    base = recipe(unpack(Path(corpora), args.work / "books"), args.work / "data")

    def keep(cell: Cell) -> None:
        write_cell(args.out, cell)
        print(f"{cell.name}: {cell.loss:.4f} {cell.reason} ({cell.seconds:.0f} s)", file=sys.stderr, flush=True)

    def fail(result: TrialResult) -> None:
        failures.append(f"{result.name}: {result.reason}")
        print(failures[-1], file=sys.stderr, flush=True)

    args.out.mkdir(parents=True, exist_ok=True)
    run_plan(plan(base), args.work / "runs", known=read_cells(args.out), jobs=args.jobs, on_cell=keep, on_failure=fail)
    if args.docs:
        write_docs(args.out, args.docs)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
