"""Continuations: the same seed gives the same text, on one rank and on sharded ones."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from surefoot.config.run import RunConfig
from surefoot.parallel.fork_launch import run_ranks
from surefoot.parallel.mesh import World, join_world
from surefoot.parallel.shard import fill_parameters
from surefoot.train.generate import continue_tokens
from surefoot.train.setup import set_up

ALONE = World(rank=0, size=1, device=torch.device("cpu"), mesh=None)
PROMPT = list(b"the step holds")
NO_END = -1
"""An end of document that no token is."""


@pytest.fixture
def untied(config: RunConfig, vary: Callable[..., RunConfig]) -> RunConfig:
    """Tied and untrained, a model only repeats the last token."""
    return vary(config, **{"model.tie_embeddings": False, "parallel.precision": "fp64"})


@pytest.fixture
def model(untied: RunConfig) -> nn.Module:
    return set_up(untied, ALONE)[1].model


def drawn(model: nn.Module, num_tokens: int, **settings: object) -> list[int]:
    chosen = {"seq_len": 64, "eos_id": NO_END, "temperature": 1.0, "prompt": PROMPT} | settings
    return continue_tokens(model, chosen.pop("prompt"), num_tokens, **chosen)  # type: ignore[arg-type]


def likeliest(model: nn.Module, prompt: list[int], num_tokens: int) -> list[int]:
    """By hand, one forward over everything so far."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        row = torch.tensor([tokens])
        with torch.no_grad():
            logits = model(row, torch.arange(len(tokens), dtype=torch.int32)[None], torch.zeros_like(row))
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_the_same_seed_gives_the_same_text_and_another_seed_another(model: nn.Module) -> None:
    one = drawn(model, 24, seed=5)
    assert len(one) == 24
    assert drawn(model, 24, seed=5) == one
    assert drawn(model, 24, seed=6) != one


def test_every_token_is_a_draw_of_its_own(model: nn.Module) -> None:
    """Untrained weights are near to indifferent: one draw used again and again would give one token again and again."""
    assert len(set(drawn(model, 24, seed=5))) > 12


def test_a_longer_continuation_begins_as_the_shorter_one(model: nn.Module) -> None:
    assert drawn(model, 24, seed=5)[:9] == drawn(model, 9, seed=5)


def test_no_draw_comes_from_torchs_own_generator(model: nn.Module) -> None:
    before = torch.get_rng_state()
    drawn(model, 3)
    assert torch.equal(torch.get_rng_state(), before)


def test_temperature_0_takes_the_likeliest_whatever_the_seed(model: nn.Module) -> None:
    expected = likeliest(model, PROMPT, 8)
    assert drawn(model, 8, temperature=0.0, seed=1) == expected
    assert drawn(model, 8, temperature=0.0, seed=2) == expected
    assert drawn(model, 8, temperature=5.0, top_k=1, seed=1) == expected


def test_the_end_of_the_document_ends_the_text_and_is_not_part_of_it(model: nn.Module) -> None:
    tokens = drawn(model, 24, seed=5)
    end = tokens[10]
    assert drawn(model, 24, seed=5, eos_id=end) == tokens[: tokens.index(end)]


def test_only_the_last_seq_len_tokens_are_seen(model: nn.Module) -> None:
    long = list(range(40)) + PROMPT
    near = drawn(model, 6, temperature=0.0, seq_len=len(PROMPT), prompt=long)
    assert near == drawn(model, 6, temperature=0.0, seq_len=len(PROMPT), prompt=PROMPT)
    assert near[0] == likeliest(model, PROMPT, 1)[0]


def test_ids_that_the_tokenizer_does_not_have_are_not_drawn(model: nn.Module) -> None:
    assert max(drawn(model, 24, seed=5)) >= 20
    assert max(drawn(model, 24, seed=5, vocab_size=20)) < 20


def test_an_empty_prompt_is_an_error_that_says_why(model: nn.Module) -> None:
    with pytest.raises(ValueError, match="the prompt has no token; give some text to continue"):
        drawn(model, 3, prompt=[])


def continued_twice(rank: int, world: int, config: RunConfig, other: RunConfig) -> tuple[list[int], list[int]]:
    """Continuations by the initial weights of one config, and then, in the same model, by those of another."""
    here = join_world(config.parallel)
    _, state = set_up(config, here)
    first = drawn(state.model, 8, temperature=0.0, device=here.device)
    fill_parameters(state.parameters, set_up(other, here)[0].draw)
    return first, drawn(state.model, 8, temperature=0.0, device=here.device)


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_sharded_ranks_say_what_one_says_and_use_restored_weights_afterwards(
    untied: RunConfig, vary: Callable[..., RunConfig], layout: str
) -> None:
    config = vary(untied, **{"parallel.data_parallel": layout})
    other = vary(config, seed=8)
    one = continued_twice(0, 1, config, other)
    assert one[0] != one[1]
    assert run_ranks(2, continued_twice, config, other) == [one, one]
