"""Held-out loss against a computation by hand, over all rows, whatever the ranks and the rows per forward."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from surefoot.config.run import RunConfig
from surefoot.data.build import prepare
from surefoot.data.errors import DataError
from surefoot.parallel.digest import digest_tensors
from surefoot.parallel.fork_launch import run_ranks
from surefoot.parallel.mesh import World, join_world
from surefoot.train.evaluate import DomainLoss, TrainingData, cadence_metrics, evaluate
from surefoot.train.setup import set_up
from tolerances import FP64_ORDER

ALONE = World(rank=0, size=1, device=torch.device("cpu"), mesh=None)


@pytest.fixture
def fp64(config: RunConfig, vary: Callable[..., RunConfig]) -> RunConfig:
    return vary(config, **{"parallel.precision": "fp64"})


def evaluated(rank: int, world: int, config: RunConfig, num_rows: int) -> list[DomainLoss]:
    """Every domain's loss of untrained weights, on the ranks that there are."""
    here = join_world(config.parallel)
    setup, _ = set_up(config, here)
    data = TrainingData.open(config, prepare(config.data))
    return [evaluate(setup, rows, num_rows) for rows in data.held_out]


def assert_same(one: list[DomainLoss], other: list[DomainLoss]) -> None:
    for mine, theirs in zip(one, other, strict=True):
        assert (mine.num_targets, mine.num_bytes) == (theirs.num_targets, theirs.num_bytes)
        assert mine.loss == pytest.approx(theirs.loss, rel=FP64_ORDER)
        assert mine.bits_per_byte == pytest.approx(theirs.bits_per_byte, rel=FP64_ORDER)


def test_bits_per_byte_is_the_length_of_a_full_code_over_the_bytes_of_the_text(
    fp64: RunConfig, corpus: tuple[Path, Path]
) -> None:
    """The tokens are bytes. Of a document all but the first byte is predicted, its end too; the first byte costs ln(257)."""
    setup, state = set_up(fp64, ALONE)
    data = TrainingData.open(fp64, prepare(fp64.data))
    for rows in data.held_out:
        nats, predicted, text_bytes = 0.0, 0, 0
        batch = rows.rows(0, rows.num_rows).batch
        arrays = (batch.tokens_BT, batch.positions_BT, batch.documents_BT)
        with torch.no_grad():
            codes = -torch.log_softmax(state.model(*map(torch.from_numpy, arrays)), dim=-1)
        for at, row in enumerate(batch.targets_BT.tolist()):
            for place, target in enumerate(row):
                if target != -100:
                    nats += float(codes[at, place, target])
                    predicted += 1
        for document in range(rows.num_documents):
            start, stop = rows.split.document_span(document)
            text_bytes += stop - start - 1  # a token is a byte of text; the last one is the end of the document
        files = [path.read_bytes() for path in (corpus[0] / rows.name).glob("*.txt")]
        assert 0 < text_bytes < sum(map(len, files))
        found = evaluate(setup, rows, 0)
        assert (found.num_targets, found.num_bytes) == (predicted, text_bytes)
        assert found.loss == pytest.approx(nats / predicted, rel=FP64_ORDER)
        code_nats = nats + rows.num_documents * math.log(257)
        assert found.bits_per_byte == pytest.approx(code_nats / math.log(2) / text_bytes, rel=FP64_ORDER)


def test_the_loss_is_over_the_predicted_tokens_which_need_not_be_as_many_as_bytes(fp64: RunConfig) -> None:
    setup, state = set_up(fp64, ALONE)
    for rows in TrainingData.open(fp64, prepare(fp64.data)).held_out:
        batch = rows.rows(0, 1).batch
        arrays = (batch.tokens_BT, batch.positions_BT, batch.documents_BT)
        with torch.no_grad():
            logits = state.model(*map(torch.from_numpy, arrays))
        mean = torch.nn.functional.cross_entropy(logits[0], torch.from_numpy(batch.targets_BT[0]), ignore_index=-100)
        found = evaluate(setup, rows, 1)
        assert found.num_targets == batch.num_targets != found.num_bytes
        assert found.loss == pytest.approx(float(mean), rel=FP64_ORDER)


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
@pytest.mark.parametrize("num_rows", [0, 3, 5])
def test_two_ranks_share_the_rows_and_find_what_one_finds(
    fp64: RunConfig, vary: Callable[..., RunConfig], layout: str, num_rows: int
) -> None:
    """Two rows a forward: of 3 rows one rank has 2 and the other 1, of 5 one has a round more, on rows that count nothing."""
    config = vary(fp64, **{"parallel.data_parallel": layout, "eval.batch_size": 2})
    both = run_ranks(2, evaluated, config, num_rows)
    assert both[0] == both[1]
    assert_same(evaluated(0, 1, config, num_rows), both[0])


def test_the_rows_per_forward_make_no_difference(fp64: RunConfig, vary: Callable[..., RunConfig]) -> None:
    one = evaluated(0, 1, vary(fp64, **{"eval.batch_size": 1}), 0)
    assert_same(one, evaluated(0, 1, vary(fp64, **{"eval.batch_size": 3}), 0))


def test_the_cadence_evaluates_its_rows_of_every_domain_and_leaves_no_trace(config: RunConfig) -> None:
    setup, state = set_up(config, ALONE)
    data = TrainingData.open(config, prepare(config.data))
    before, draws = digest_tensors(state.tensors()), torch.get_rng_state()
    metrics = cadence_metrics(setup, data)
    assert digest_tensors(state.tensors()) == before
    assert torch.equal(torch.get_rng_state(), draws)
    for rows in data.held_out:
        found = evaluate(setup, rows, config.eval.rows)
        assert metrics[f"eval/{rows.name}/loss"] == found.loss
        assert metrics[f"eval/{rows.name}/bits_per_byte"] == found.bits_per_byte
    assert len(metrics) == 2 * len(data.held_out)


def test_a_model_with_fewer_ids_than_the_tokenizer_is_refused_with_the_number(
    config: RunConfig, vary: Callable[..., RunConfig]
) -> None:
    small = vary(config, **{"model.vocab_size": 256})
    with pytest.raises(DataError, match=r"model.vocab_size=256 is below the tokenizer's 257 ids; use .* 257"):
        TrainingData.open(small, prepare(small.data))


def test_the_tokens_before_a_batch_are_those_of_whole_batches(config: RunConfig) -> None:
    data = TrainingData.open(config, prepare(config.data))
    per_batch = config.data.batch_size * config.data.seq_len
    assert [data.tokens_before(index) for index in (0, 1, 7)] == [0, per_batch, 7 * per_batch]
