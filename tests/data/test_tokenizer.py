import json
import os
import subprocess
import sys

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models

from surefoot.config.data import BpeTokenizer, BytesTokenizer, TokenizerFile
from surefoot.data.errors import DataError
from surefoot.data.tokenizer import EOS_TOKEN, ByteTokenizer, load_tokenizer, read_tokenizer, train_bpe

CORPUS = [f"def f{at}(x):\n    return x + {at}  # été {at * 7}\n" * 3 for at in range(60)]


@pytest.fixture(scope="module")
def bpe():
    return train_bpe(CORPUS, 320)


@pytest.mark.parametrize("text", ["", "héllo\n\tworld  ", "日本語 🐍", f"it says {EOS_TOKEN} here", "\x00\x7f"])
def test_text_comes_back_and_its_tokens_count_its_bytes(bpe, text):
    for tokenizer in (ByteTokenizer(), bpe):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode([*ids, tokenizer.eos_id]) == text
        assert tokenizer.token_num_bytes()[ids].sum() == len(text.encode())
        assert tokenizer.eos_id not in ids
        assert [each.tolist() for each in tokenizer.encode_batch([text, "x"])] == [ids, tokenizer.encode("x")]


def test_the_vocabulary_has_the_size_asked_for_with_the_end_of_document_in_it(bpe):
    assert bpe.vocab_size == 320
    assert bpe.token_num_bytes().shape == (320,)
    assert bpe.token_num_bytes()[bpe.eos_id] == 0
    assert (np.delete(bpe.token_num_bytes(), bpe.eos_id) > 0).all()


def test_a_tokenizer_saved_and_read_is_the_same(bpe, tmp_path):
    bpe.save(tmp_path / "tokenizer.json")
    for cfg in (BpeTokenizer(vocab_size=320), TokenizerFile(path=str(tmp_path / "tokenizer.json"))):
        again = load_tokenizer(cfg, tmp_path / "tokenizer.json")
        assert again.fingerprint == bpe.fingerprint
        assert again.encode(CORPUS[3]) == bpe.encode(CORPUS[3])
        assert again.encode(EOS_TOKEN) == bpe.encode(EOS_TOKEN) != [bpe.eos_id]
    assert isinstance(load_tokenizer(BytesTokenizer(), None), ByteTokenizer)


@pytest.mark.parametrize("threads", ["1", "3"])
def test_training_gives_the_same_bpe_for_any_number_of_workers_and_order(bpe, threads):
    script = (
        "import json, sys; from surefoot.data.tokenizer import train_bpe;"
        "print(train_bpe(json.load(sys.stdin), 320).fingerprint)"
    )
    environment = {**os.environ, "RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads}
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, input=json.dumps(CORPUS[::-1]), env=environment, check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == bpe.fingerprint


def test_another_corpus_gives_another_fingerprint(bpe):
    assert train_bpe([text.upper() for text in CORPUS], 320).fingerprint != bpe.fingerprint


def test_a_vocabulary_below_the_bytes_is_refused_with_the_number():
    with pytest.raises(DataError, match=r"vocab_size=256 is below 257, .* raise it or set data.tokenizer.kind = bytes"):
        train_bpe(CORPUS, 256)


def test_a_file_without_the_end_of_document_token_is_refused(bpe, tmp_path):
    bpe.save(tmp_path / "tokenizer.json")
    with pytest.raises(DataError, match=r"tokenizer.json: the token '</s>' is not in its vocabulary; set .*eos_token"):
        read_tokenizer(tmp_path / "tokenizer.json", "</s>")


def test_a_missing_or_damaged_file_is_refused_by_name(tmp_path):
    with pytest.raises(DataError, match=r"none.json: no such tokenizer file"):
        read_tokenizer(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(DataError, match=r"bad.json: not a tokenizer.json of the tokenizers library"):
        read_tokenizer(tmp_path / "bad.json")


def test_byte_fallback_pieces_count_their_bytes(tmp_path):
    vocab = {"<unk>": 0, "</s>": 1, "<0xC3>": 2, "<0xA9>": 3, "▁a": 4, "b": 5}
    inner = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    inner.add_special_tokens(["</s>"])
    inner.save(str(tmp_path / "t.json"))
    assert read_tokenizer(tmp_path / "t.json", "</s>").token_num_bytes()[1:].tolist() == [0, 1, 1, 2, 1]


def test_a_vocabulary_whose_bytes_are_unknown_is_refused(tmp_path):
    inner = tokenizers.Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    inner.save(str(tmp_path / "t.json"))
    with pytest.raises(DataError, match=r"t.json: the bytes of its tokens are unknown .* use a byte-level BPE"):
        read_tokenizer(tmp_path / "t.json", "</s>").token_num_bytes()
