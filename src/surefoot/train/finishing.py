"""The end of a run: all held-out rows, what compressors make of the same bytes, a continuation per domain, the last ledger row."""

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from surefoot.data.baselines import compression_baselines, held_out_texts
from surefoot.data.loader import EvalRows
from surefoot.data.tokenizer import load_tokenizer
from surefoot.monitor.facts import Sample, Yardstick
from surefoot.parallel.digest import combine, digest_tensors
from surefoot.train.evaluate import DomainLoss, evaluate
from surefoot.train.generate import continue_tokens
from surefoot.train.run import OpenRun

YARDSTICK_BYTES = 64 << 20
"""Held-out bytes per domain that are compressed at most; xz takes a minute for them."""
PROMPT_TOKENS = 48
"""Held-out tokens that a shown continuation starts from."""


def finish(run: OpenRun, stop_asked: Callable[[], bool] = lambda: False) -> bool:
    """Evaluate all held-out rows, measure the yardsticks, draw the continuations, and close the ledger.

    Looks between domains whether a stop is asked; then nothing is written and the answer is False: the state is on disk, and the same
    command comes back here. Collective over ranks.
    """
    state, store = run.state, run.keeping.store
    if store:
        run.keeping.notify("note", {"text": "Evaluating on all held-out text."})
    results: dict[str, DomainLoss] = {}
    for rows in run.data.held_out:
        results[rows.name] = evaluate(run.setup, rows, run.config.eval.final_rows)
        if run.keeping.from_leader(stop_asked()):
            return False
    samples = draw_samples(run)
    digest = combine(digest_tensors(state.tensors()))
    if store:
        told = {f"eval/{name}/bits_per_byte": result.bits_per_byte for name, result in results.items()}
        run.keeping.notify("eval", {"step": state.step, "whole": True, **told})
        for source, rows in enumerate(run.data.held_out):
            found = compression_baselines(first_bytes(held_out_texts(run.config.data, run.data.prepared, source)))
            Yardstick(
                domain=rows.name,
                num_bytes=found.num_bytes,
                zlib_bits_per_byte=found.zlib_bits_per_byte,
                xz_bits_per_byte=found.xz_bits_per_byte,
            ).write(store, state.batch_index, state.step)
        for sample in samples:
            sample.write(store, state.batch_index, state.step)
        store.flush(sync=True)
    run.keeping.record(
        "finish",
        step=state.step,
        batch_index=state.batch_index,
        digest=digest,
        loss={name: result.loss for name, result in results.items()},
        bits_per_byte={name: result.bits_per_byte for name, result in results.items()},
    )
    if store:
        store.heartbeat(state.step, state.batch_index, "finished", force=True)
    return True


def first_bytes(texts: Iterable[bytes], limit: int = YARDSTICK_BYTES) -> Iterator[bytes]:
    """Whole documents until ``limit`` bytes are passed: compressors learn a text's style in less."""
    total = 0
    for text in texts:
        if total >= limit:
            return
        total += len(text)
        yield text


def draw_samples(run: OpenRun) -> list[Sample]:
    """A continuation per domain, where they are asked for; none, which is said, of a model in stages: no rank can run it by itself."""
    if not run.config.log.sample_tokens:
        return []
    if run.setup.world.layout.pp > 1:
        if run.keeping.store:
            text = f"The model lies in stages, so no continuations are drawn: `surefoot sample {run.keeping.folder}` draws them from its checkpoint."
            run.keeping.notify("note", {"text": text})
        return []
    return [sample for rows in run.data.held_out if (sample := draw_sample(run, rows)) is not None]


def draw_sample(run: OpenRun, rows: EvalRows) -> Sample | None:
    """What the model makes of the beginning of the first held-out document that is long enough to begin."""
    config = run.config
    tokenizer = load_tokenizer(config.data.tokenizer, run.data.prepared.tokenizer_path)
    prompt = first_prompt(rows)
    if not prompt:
        return None
    drawn = continue_tokens(
        run.state.model,
        prompt,
        config.log.sample_tokens,
        seq_len=config.data.seq_len,
        eos_id=run.data.prepared.eos_id,
        vocab_size=run.data.prepared.vocab_size,
        seed=config.seed + rows.source,
        device=run.setup.world.device,
    )
    return Sample(domain=rows.name, prompt=tokenizer.decode(prompt), text=tokenizer.decode(drawn))


def first_prompt(rows: EvalRows) -> list[int]:
    """The first tokens of the first held-out document that holds twice as many; of the longest one where none does."""
    split = rows.split
    best = 0
    for document in range(min(split.num_documents, 1000)):
        start, stop = split.document_span(document)
        if stop - start > 2 * PROMPT_TOKENS:
            return _ids(rows, start, start + PROMPT_TOKENS)
        best = max(best, document, key=lambda d: split.document_span(d)[1] - split.document_span(d)[0])
    start, stop = split.document_span(best)
    return _ids(rows, start, max(start + 1, start + (stop - start) // 2))


def _ids(rows: EvalRows, start: int, stop: int) -> list[int]:
    ids = np.empty(stop - start, dtype=rows.split.dtype)
    rows.split.read(start, ids)
    return [int(token) for token in ids]
