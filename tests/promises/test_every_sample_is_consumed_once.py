"""Promise 12: every sample is consumed exactly once per epoch through crash, resume, rollback and change of world size."""

from pathlib import Path

import pytest

from surefoot.config.run import RunConfig
from surefoot.data.audit import AuditReport, ConsumedBatch, audit
from surefoot.data.loader import Loader
from surefoot.monitor.run import Run
from surefoot.parallel.fork_launch import run_ranks
from surefoot.proof.rehearsal import Crashed, Script, rehearse, rehearse_on_rank


def audit_run(folder: Path, loader: Loader) -> AuditReport:
    run = Run(folder)
    rows = [
        ConsumedBatch(r["batch_index"], r["sample_digest"], tuple(r.get("excluded", ())), bool(r.get("skipped")))
        for r in run.rows
    ]
    return audit(rows, loader, run.ledger.exclusions)


def test_the_surviving_lineage_holds_every_sample_once(
    config: RunConfig, loader: Loader, late_document: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    with pytest.raises(Crashed):
        rehearse(config, folder, Script(nan_batches=(6,), die_after=8))
    run_ranks(2, rehearse_on_rank, config, folder, Script(nan_batches=(6,), stop_after=12))
    script = Script(nan_batches=(6,), rollback_after=17, rollback_to=14, exclude=(late_document,))
    rehearse(config, folder, script)
    reasons = [attempt.reason for attempt in Run(folder).attempts]
    assert reasons == ["start", "resume", "resume", "rollback"]
    found = audit_run(folder, loader)
    assert found.ok, found.mistakes
    assert found.num_batches == 25
    assert found.num_samples == 25 * config.data.batch_size
    assert found.skipped_batches == (6,)
    assert found.excluded_documents == (late_document,)


def test_the_audit_finds_a_row_that_is_missing_or_another(config: RunConfig, loader: Loader, tmp_path: Path) -> None:
    rehearse(config, tmp_path / "run")
    rows = tmp_path / "run" / "attempts" / "0001" / "metrics.jsonl"
    lines = rows.read_text().splitlines(keepends=True)
    rows.write_text("".join(lines[:5] + lines[6:]))
    assert any("batch 5 was never consumed" in mistake for mistake in audit_run(tmp_path / "run", loader).mistakes)
    rows.write_text(
        "".join(lines[:5]) + lines[5].replace('"sample_digest":"', '"sample_digest":"0') + "".join(lines[6:])
    )
    assert any("digest" in mistake for mistake in audit_run(tmp_path / "run", loader).mistakes)
