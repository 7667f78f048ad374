"""The end of a run in a dozen lines that need no explanation."""

import math
import textwrap

from surefoot.monitor.facts import Sample
from surefoot.monitor.summary import Domain, Summary
from surefoot.monitor.wording import duration, percent, several, short

WIDTH = 78


def summary_text(summary: Summary, report: str = "") -> str:
    """Loss, held-out bits per byte beside the compressors', time, what went wrong, samples, what to do next."""
    blocks = [_headline(summary), _domains(summary.domains), _figures(summary)]
    blocks += [_sample(sample) for sample in summary.samples]
    blocks.append(_next(summary, report))
    return "\n\n".join(block for block in blocks if block)


def _headline(summary: Summary) -> str:
    goal = f" of {summary.steps:,}" if summary.steps and summary.step != summary.steps else ""
    how = {
        "finished": "finished after",
        "stopped": "stopped at",
        "crashed": "ended without a word at",
        "running": "is running, at",
        "empty": "has not started, at",
    }[summary.state]
    reason = f" ({summary.reason})" if summary.reason else ""
    return f"{summary.name} {how} step {summary.step:,}{goal}{reason}."


def _domains(domains: tuple[Domain, ...]) -> str:
    if not domains:
        return "No held-out evaluation yet."
    wide = max(len(domain.name) for domain in domains)
    lines = ["Held-out text, bits per byte (lower is better; 8 is no compression):"]
    lines.append(f"  {'':{wide}}  {'model':>7}  {'zlib -9':>7}  {'xz':>7}")
    for domain in domains:
        row = f"  {domain.name:{wide}}  {domain.bits_per_byte:7.3f}"
        row += f"  {_figure(domain.zlib_bits_per_byte):>7}  {_figure(domain.xz_bits_per_byte):>7}"
        lines.append(f"{row}  {domain.yardstick}".rstrip())
    return "\n".join(lines)


def _figure(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "-"


def _figures(summary: Summary) -> str:
    lost = f", {duration(summary.lost_s)} in steps that were redone" if summary.lost_s >= 1 else ""
    speed = f", {short(summary.tokens_per_s)} tokens/s" if math.isfinite(summary.tokens_per_s) else ""
    mfu = f", {percent(summary.mfu)} of the matmul peak (MFU)" if math.isfinite(summary.mfu) else ""
    lines = []
    if math.isfinite(summary.final_loss):
        lines.append(f"training loss  {summary.final_loss:.3f} nats per token (mean of the last updates)")
    wall = max(summary.wall_s, summary.train_s + summary.lost_s)
    lines.append(f"time           {duration(wall)}: {duration(summary.train_s)} in steps that count{lost}")
    lines.append(f"tokens         {short(summary.tokens)}{speed}{mfu}")
    if math.isfinite(summary.critical_batch):
        batch = f"; the first batch has {short(summary.facts.batch_tokens)}" if summary.facts else ""
        lines.append(f"critical batch {short(summary.critical_batch)} tokens, by the gradient noise scale{batch}")
    lines.append(f"stability      {_stability(summary)}")
    return "\n".join(lines)


def _stability(summary: Summary) -> str:
    parts = [several(summary.skipped, "skipped step"), several(summary.rollbacks, "rollback")]
    if summary.resumes:
        parts.append(several(summary.resumes, "resume"))
    if summary.excluded:
        parts.append(several(len(summary.excluded), "excluded document"))
    return ", ".join(parts)


def _sample(sample: Sample) -> str:
    """The prompt, a bar, what the model made of it, line by line as it wrote it; of blank lines in a row, one."""
    written = f"{sample.prompt}▮{sample.text}".replace("\r", "").strip("\n").split("\n")
    lines: list[str] = []
    for line in written:
        if line.strip() or (lines and lines[-1]):
            lines += [piece.rstrip() for piece in _WRAPPER.wrap(line)] or [""]
    shown = "\n".join(f"  | {line}".rstrip() for line in lines)
    return f"{sample.domain}, continued by the model from ▮:\n{shown}"


_WRAPPER = textwrap.TextWrapper(WIDTH - 4, drop_whitespace=False, replace_whitespace=False)


def _next(summary: Summary, report: str) -> str:
    lines = [f"report     {report}"] if report else []
    if summary.checkpoint:
        lines.append(f"checkpoint {summary.folder}/checkpoints/{summary.checkpoint}")
    if summary.how_to_continue:
        lines.append(f"continue   {summary.how_to_continue}")
    return "\n".join(lines)
