"""A real trained Llama, 260K parameters, from llama2.c: the loss it is known to have on text it has not seen."""

import gzip
import itertools
import json
import os
import struct
from pathlib import Path

import pytest
import torch

from surefoot.interop.huggingface import load_folder
from surefoot.model.transformer import Transformer

SHARED = Path(os.environ.get("SUREFOOT_SHARED", Path(__file__).parents[3] / "shared"))
MODEL = SHARED / "models" / "stories260K"
STORIES = SHARED / "corpora" / "prose" / "tinystories_val.jsonl.gz"

NATS_PER_TOKEN = 1.1974
# the figure is published with four decimals
NATS_TOLERANCE = 0.00005
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


@pytest.mark.skipif(not (MODEL.is_dir() and STORIES.is_file()), reason=f"no trained model in {MODEL}")
def test_the_trained_model_has_its_published_loss_on_unseen_stories() -> None:
    cfg, state = load_folder(MODEL / "stories260K-hf")
    model = Transformer(cfg, torch.float32)
    model.load_state_dict(state)
    tokenizer = ScoredTokenizer(MODEL / "tok512.bin", cfg.vocab_size)
    with gzip.open(STORIES, "rt", encoding="utf-8") as lines:
        stories = [json.loads(next(lines))["text"] for _ in range(NUM_DOCUMENTS)]
    nats, count = 0.0, 0
    with torch.no_grad():
        for story in stories:
            ids = torch.tensor(tokenizer.encode(story)[:MAX_TOKENS])[None]
            sums = model(ids[:, :-1], torch.arange(ids.shape[1] - 1)[None], None, ids[:, 1:])
            nats += float(sums.ce_sum)
            count += ids.shape[1] - 1
    assert abs(nats / count - NATS_PER_TOKEN) <= NATS_TOLERANCE
