"""A real trained Llama, 260K parameters, from llama2.c: the loss it is known to have on text it has not seen."""

import gzip
import itertools
import json
import os
import struct
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from surefoot.interop.huggingface import load_folder
from surefoot.model.transformer import Transformer
from tolerances import HUGGING_FACE, STORIES_NATS

SHARED = Path(os.environ.get("SUREFOOT_SHARED", Path(__file__).parents[3] / "shared"))
MODEL = SHARED / "models" / "stories260K"
STORIES = SHARED / "corpora" / "prose" / "tinystories_val.jsonl.gz"

# The corpora's README gives 1.1974 on 150 documents without saying how they were cut. The first 150 documents, each with its BOS and cut to
# the 512 tokens the model was trained on, give this figure, here and in transformers; README's would take some other cut (tried without a
# match: limits of 16 to 512 tokens, mean over tokens or documents, with and without BOS and end, newlines kept, single, dropped or spaces).
NATS_PER_TOKEN = 1.28659
NUM_DOCUMENTS = 150
MAX_TOKENS = 512
BOS = 1


class ScoredTokenizer:
    """llama2.c's tokenizer.bin: pieces with scores; the neighbours whose union scores highest are merged first."""

    def __init__(self, path: Path, vocab_size: int) -> None:
        raw = path.read_bytes()
        self.scores: list[float] = []
        self.pieces: list[bytes] = []
        at = 4  # after the length of the longest piece
        for _ in range(vocab_size):
            score, length = struct.unpack_from("<fi", raw, at)
            self.scores.append(score)
            self.pieces.append(raw[at + 8 : at + 8 + length])
            at += 8 + length
        assert at == len(raw)
        self.ids = {piece: i for i, piece in reversed(list(enumerate(self.pieces)))}

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for character in " " + text:
            piece = character.encode()
            ids += [self.ids[piece]] if piece in self.ids else [byte + 3 for byte in piece]
        while True:
            merges = [
                (self.scores[union], -i, union)
                for i, (a, b) in enumerate(itertools.pairwise(ids))
                if (union := self.ids.get(self.pieces[a] + self.pieces[b])) is not None
            ]
            if not merges:
                return [BOS, *ids]
            _, i, union = max(merges)
            ids[-i : -i + 2] = [union]


present = pytest.mark.skipif(not (MODEL.is_dir() and STORIES.is_file()), reason=f"no trained model in {MODEL}")


@pytest.fixture(scope="module")
def stories() -> list[torch.Tensor]:
    tokenizer = ScoredTokenizer(MODEL / "tok512.bin", 512)
    with gzip.open(STORIES, "rt", encoding="utf-8") as lines:
        texts = [json.loads(next(lines))["text"] for _ in range(NUM_DOCUMENTS)]
    return [torch.tensor(tokenizer.encode(text)[:MAX_TOKENS])[None] for text in texts]


@pytest.fixture(scope="module")
def model() -> Transformer:
    cfg, state = load_folder(MODEL / "stories260K-hf")
    model = Transformer(cfg, torch.float32)
    model.load_state_dict(state)
    return model


def nats(model: Transformer, ids: torch.Tensor) -> float:
    with torch.no_grad():
        return float(model(ids[:, :-1], torch.arange(ids.shape[1] - 1)[None], None, ids[:, 1:]).ce_sum)


@present
def test_the_trained_model_has_its_loss_on_unseen_stories(model: Transformer, stories: list[torch.Tensor]) -> None:
    count = sum(ids.shape[1] - 1 for ids in stories)
    assert abs(sum(nats(model, ids) for ids in stories) / count - NATS_PER_TOKEN) <= STORIES_NATS


@present
def test_the_trained_model_agrees_with_transformers_on_every_story(
    model: Transformer, stories: list[torch.Tensor]
) -> None:
    theirs = LlamaForCausalLM.from_pretrained(MODEL / "stories260K-hf").eval()
    for ids in stories[:10]:
        with torch.no_grad():
            reference = theirs(input_ids=ids, labels=ids, use_cache=False)
            logits = model(ids, torch.arange(ids.shape[1])[None], None)
        assert nats(model, ids) == pytest.approx(float(reference.loss) * (ids.shape[1] - 1), rel=HUGGING_FACE)
        assert float((logits - reference.logits).norm() / reference.logits.norm()) <= HUGGING_FACE
