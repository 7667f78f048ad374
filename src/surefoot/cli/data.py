"""``surefoot data``: build shards, look at them, and audit what a run consumed."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.cli import exit_codes
from surefoot.cli.run_folder import run_folder
from surefoot.cli.train_args import parse_train_args
from surefoot.config.errors import ConfigError
from surefoot.config.run import RunConfig

if TYPE_CHECKING:
    from surefoot.data.loader import Loader
    from surefoot.data.tokenizer import Tokenizer

SHOWN = 3
"""Rows of a batch that ``inspect`` shows in full."""


def main(argv: Sequence[str]) -> int:
    """Run one ``surefoot data`` command."""
    parser = argparse.ArgumentParser(
        prog="surefoot data", description="Builds, shows and audits token shards.", allow_abbrev=False
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    build = actions.add_parser(
        "build",
        help="build the shards of a recipe's sources",
        usage="surefoot data build RECIPE [--config FILE] [--key value ...]",
    )
    look = actions.add_parser(
        "inspect",
        help="documents, tokens and domains of a recipe's data, and what batch n holds",
        usage="surefoot data inspect RECIPE [--batch N] [--config FILE] [--key value ...]",
    )
    look.add_argument("--batch", type=int, metavar="N", help="show what this batch holds, decoded")
    check = actions.add_parser("audit", help="prove from a run's rows that every sample was consumed once per epoch")
    check.add_argument("run", type=run_folder, metavar="RUN")
    for action in (build, look, check):
        action.add_argument("--json", action="store_true", help="JSON on standard output")
    args, rest = parser.parse_known_args(argv)
    if args.action == "audit":
        if rest:
            raise ConfigError([f"surefoot data audit: {rest[0]} is not known; it takes a run folder and --json"])
        return audit_run(args.run, as_json=args.json)
    if getattr(args, "batch", None) is not None and args.batch < 0:
        raise ConfigError([f"--batch {args.batch}: batches count from 0"])
    config = parse_train_args(rest).config
    if args.action == "build":
        return build_data(config, as_json=args.json)
    return inspect_data(config, args.batch, as_json=args.json)


def build_data(config: RunConfig, *, as_json: bool) -> int:
    """Build what is missing and say where it is."""
    from surefoot.cli.session import BuildProgress
    from surefoot.data.build import prepare

    progress = BuildProgress()
    try:
        prepared = prepare(config.data, progress=progress)
    finally:
        progress.end()
    facts = {
        "fingerprint": prepared.fingerprint,
        "tokenizer_fingerprint": prepared.tokenizer_fingerprint,
        "sources": {source.name: str(source.train.parent) for source in prepared.sources},
    }
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        print(
            f"data {prepared.fingerprint}, tokenizer {prepared.tokenizer_fingerprint[:16]} with {prepared.vocab_size:,} tokens"
        )
        for source in prepared.sources:
            print(f"{source.name}: {source.train.parent}")
        print('use a folder elsewhere as --data.sources.N.documents \'{kind = "shards", path = "FOLDER"}\'')
    return exit_codes.DONE


def inspect_data(config: RunConfig, batch_index: int | None, *, as_json: bool) -> int:
    """Figures per domain and side, and one batch in full."""
    from surefoot.data.build import prepare
    from surefoot.data.loader import Loader
    from surefoot.data.shards import Split
    from surefoot.data.tokenizer import load_tokenizer

    prepared = prepare(config.data)
    loader = Loader(config.data, prepared, config.seed)
    tokenizer = load_tokenizer(config.data.tokenizer, prepared.tokenizer_path)
    sides = []
    for at, source in enumerate(prepared.sources):
        for side, folder in (("train", source.train), ("val", source.val)):
            manifest = Split.open(folder).manifest
            sides.append(
                {
                    "source": source.name,
                    "side": side,
                    "documents": manifest.num_documents,
                    "tokens": manifest.num_tokens,
                    "bytes": manifest.num_bytes,
                    "bytes_per_token": manifest.num_bytes / max(1, manifest.num_tokens),
                    "rows_per_epoch": loader.mixture.num_rows[at] if side == "train" else None,
                }
            )
    shown = None if batch_index is None else _batch(loader, tokenizer, batch_index)
    if as_json:
        print(json.dumps({"fingerprint": prepared.fingerprint, "splits": sides, "batch": shown}, indent=2))
        return exit_codes.DONE
    print(f"data {prepared.fingerprint}")
    print(
        f"{'source':12} {'side':6} {'documents':>10} {'tokens':>14} {'bytes':>14} {'bytes/token':>12} {'rows/epoch':>11}"
    )
    for row in sides:
        rows = f"{row['rows_per_epoch']:,}" if row["rows_per_epoch"] else ""
        print(
            f"{row['source']:12} {row['side']:6} {row['documents']:10,} {row['tokens']:14,} {row['bytes']:14,} "
            f"{row['bytes_per_token']:12.2f} {rows:>11}"
        )
    if shown:
        _print_batch(shown)
    return exit_codes.DONE


def audit_run(folder: Path, *, as_json: bool) -> int:
    """Recompute every batch of the surviving lineage; exit code 3 when a sample is missing, repeated or another."""
    from surefoot.config.codec import from_toml
    from surefoot.data.audit import ConsumedBatch, audit
    from surefoot.data.build import prepare
    from surefoot.data.loader import Loader
    from surefoot.monitor.run import Run

    run = Run(folder)
    config = from_toml(RunConfig, folder / "config.toml")
    loader = Loader(config.data, prepare(config.data), config.seed)
    consumed = [
        ConsumedBatch(
            batch_index=row["batch_index"],
            digest=row["sample_digest"],
            excluded=tuple(row.get("excluded", ())),
            skipped=bool(row.get("skipped", False)),
        )
        for row in run.rows
        if "sample_digest" in row
    ]
    first = run.attempts[0].from_batch if run.attempts else 0
    found = audit(consumed, loader, run.ledger.exclusions, first_batch=first)
    if as_json:
        print(json.dumps(dataclasses.asdict(found) | {"ok": found.ok}, indent=2))
        return exit_codes.DONE if found.ok else exit_codes.DATA
    print(
        f"{found.num_batches:,} batches, {found.num_samples:,} samples, recomputed from the config and compared with the rows"
    )
    for source in found.sources:
        print(
            f"  {source.name}: {source.rows_consumed:,} of {source.rows_per_epoch:,} rows per epoch, {source.epochs:.2f} epochs"
        )
    print(f"skipped batches: {', '.join(map(str, found.skipped_batches)) or 'none'}")
    print(f"excluded documents: {', '.join(found.excluded_documents) or 'none'}")
    for mistake in found.mistakes:
        print(mistake, file=sys.stderr)
    print(
        "every sample was consumed exactly once per epoch" if found.ok else f"{len(found.mistakes)} mistakes, see above"
    )
    return exit_codes.DONE if found.ok else exit_codes.DATA


def _batch(loader: "Loader", tokenizer: "Tokenizer", batch_index: int) -> dict[str, Any]:
    batch = loader.batch(batch_index)
    rows = []
    for at, (source, epoch, row) in enumerate(batch.samples_B3.tolist()):
        spans = loader.row_documents(source, row)
        entry: dict[str, Any] = {
            "source": loader.data.sources[source].name,
            "epoch": epoch,
            "row": row,
            "documents": [dataclasses.asdict(span) for span in spans],
        }
        if at < SHOWN:
            entry["text"] = [
                tokenizer.decode(batch.tokens_BT[at, span.offset : span.offset + span.stop - span.start].tolist())
                for span in spans
            ]
        rows.append(entry)
    return {"batch_index": batch_index, "digest": batch.digest, "num_targets": batch.num_targets, "rows": rows}


def _print_batch(shown: dict[str, Any]) -> None:
    print(
        f"\nbatch {shown['batch_index']}: {len(shown['rows'])} rows, {shown['num_targets']:,} targets, digest {shown['digest']}"
    )
    for row in shown["rows"]:
        names = ", ".join(f"{span['document']}[{span['start']}:{span['stop']}]" for span in row["documents"][:SHOWN])
        more = f" and {len(row['documents']) - SHOWN} more" if len(row["documents"]) > SHOWN else ""
        print(f"- {row['source']} row {row['row']} (epoch {row['epoch']}): {names}{more}")
        for span, text in zip(row["documents"], row.get("text", ()), strict=False):
            head, tail = text[:120].replace("\n", "⏎"), text[-60:].replace("\n", "⏎") if len(text) > 180 else ""
            print(f"    {span['document']} | {head}{' … ' + tail if tail else ''}")
