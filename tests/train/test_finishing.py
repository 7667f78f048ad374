"""The end of a run: all held-out rows, and continuations of held-out documents."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from surefoot.config.run import RunConfig
from surefoot.data.build import prepare
from surefoot.monitor.run import Run
from surefoot.parallel.digest import combine, digest_tensors
from surefoot.parallel.fork_launch import run_ranks
from surefoot.parallel.mesh import join_world
from surefoot.train.evaluate import TrainingData, evaluate
from surefoot.train.finishing import PROMPT_TOKENS, draw_sample, draw_samples, finish, first_bytes, first_prompt
from surefoot.train.run import open_run


def ignore(kind: str, row: Mapping[str, Any]) -> None:
    return None


def test_the_end_is_measured_on_all_held_out_rows_whatever_the_cadence_takes(config: RunConfig, tmp_path: Path) -> None:
    config = dataclasses.replace(config, eval=dataclasses.replace(config.eval, rows=1))
    with open_run(config, tmp_path / "run", join_world(config.parallel), notify=ignore, peak=0.0) as run:
        finish(run)
        end = run.keeping.ledger.finish
        assert end is not None
        assert end["digest"] == combine(digest_tensors(run.state.tensors()))
        assert (end["step"], end["batch_index"]) == (0, 0)
        for rows in run.data.held_out:
            assert rows.num_rows > 1
            whole = evaluate(run.setup, rows, 0)
            assert end["loss"][rows.name] == whole.loss != evaluate(run.setup, rows, 1).loss
            assert end["bits_per_byte"][rows.name] == whole.bits_per_byte
            assert whole.num_bytes == rows.num_bytes
    assert Run(tmp_path / "run").status().state == "finished"


def test_a_continuation_begins_as_a_held_out_document_and_is_the_same_every_time(
    config: RunConfig, tmp_path: Path
) -> None:
    config = dataclasses.replace(config, log=dataclasses.replace(config.log, sample_tokens=12))
    with open_run(config, tmp_path / "run", join_world(config.parallel), notify=ignore, peak=0.0) as run:
        for rows in run.data.held_out:
            sample = draw_sample(run, rows)
            assert sample == draw_sample(run, rows)
            assert sample is not None
            assert sample.domain == rows.name
            assert sample.prompt.startswith(f"{rows.name} ")
            assert 0 < len(sample.text) <= 12


def test_a_prompt_is_the_beginning_of_a_document_and_leaves_as_much_of_it_untold(config: RunConfig) -> None:
    for rows in TrainingData.open(config, prepare(config.data)).held_out:
        prompt = bytes(first_prompt(rows)).decode()
        assert len(prompt) == PROMPT_TOKENS
        assert prompt.startswith(f"{rows.name} ")


def test_where_no_document_is_long_enough_half_of_the_longest_is_the_prompt(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surefoot.train.finishing.PROMPT_TOKENS", 100_000)
    for rows in TrainingData.open(config, prepare(config.data)).held_out:
        spans = [rows.split.document_span(document) for document in range(rows.num_documents)]
        assert len(first_prompt(rows)) == max(stop - start for start, stop in spans) // 2


@pytest.mark.parametrize(("limit", "taken"), [(0, 0), (1, 1), (5, 1), (6, 2), (99, 3)])
def test_yardsticks_take_whole_documents_until_they_have_enough(limit: int, taken: int) -> None:
    texts = [b"12345", b"678", b"9"]
    assert list(first_bytes(texts, limit)) == texts[:taken]


def drawn(rank: int, world: int, config: RunConfig, folder: Path) -> tuple[list[str], list[str]]:
    """Continuations of untrained weights, and what was said of them."""
    said: list[str] = []

    def notify(kind: str, row: Mapping[str, Any]) -> None:
        if kind == "note":
            said.append(str(row["text"]))

    with open_run(config, folder, join_world(config.parallel), notify=notify, peak=0.0) as run:
        return [sample.text for sample in draw_samples(run)], said


def test_ranks_that_share_out_a_model_draw_what_one_process_draws_and_stages_say_that_they_draw_nothing(
    config: RunConfig, vary: Callable[..., RunConfig], tmp_path: Path
) -> None:
    config = vary(config, **{"log.sample_tokens": 6, "parallel.precision": "fp64", "model.vocab_size": 258})
    alone = drawn(0, 1, config, tmp_path / "alone")
    assert len(alone[0]) == 2
    assert alone[1] == []
    for name, settings in (("tp", {"parallel.tp": 2}), ("fsdp", {"parallel.data_parallel": "fsdp"})):
        assert run_ranks(2, drawn, vary(config, **settings), tmp_path / name) == [alone] * 2
    first, second = run_ranks(
        2, drawn, vary(config, **{"parallel.pp": 2, "parallel.micro_batch_size": 2}), tmp_path / "pp"
    )
    assert first == ([], [first[1][0]])
    assert first[1][0].startswith("The model lies in stages, so no continuations are drawn: `surefoot sample ")
    assert second == ([], [])
