import lzma
import zlib

import pytest

from surefoot.config.data import BpeTokenizer, DataConfig, SourceConfig, TextFiles
from surefoot.data.baselines import compression_baselines, held_out_texts
from surefoot.data.build import prepare


def test_the_baselines_are_those_of_the_compressors_on_the_joined_text():
    texts = [f"document {at} été {at * at}\n".encode() * 5 for at in range(200)]
    joined = b"".join(texts)
    found = compression_baselines(iter(texts))
    assert found.num_bytes == len(joined)
    assert found.zlib_bits_per_byte == 8 * len(zlib.compress(joined, 9)) / len(joined)
    assert found.xz_bits_per_byte == 8 * len(lzma.compress(joined, preset=6)) / len(joined)
    assert found.xz_bits_per_byte < found.zlib_bits_per_byte < 8


def test_no_text_has_no_baseline():
    with pytest.raises(ValueError, match="no text to compress"):
        compression_baselines([])


def test_held_out_texts_come_back_byte_for_byte(tmp_path):
    originals = {f"text {at} été\n\t{'x ' * at}<|endoftext|>".encode() for at in range(30)}
    for at, text in enumerate(originals):
        (tmp_path / f"{at}.txt").write_bytes(text)
    source = SourceConfig(name="a", documents=TextFiles(glob=str(tmp_path / "*.txt")))
    data = DataConfig(
        sources=(source,),
        tokenizer=BpeTokenizer(vocab_size=300),
        seq_len=8,
        batch_size=1,
        val_fraction=0.5,
        cache_dir=str(tmp_path / "cache"),
    )
    prepared = prepare(data)
    texts = list(held_out_texts(data, prepared, 0))
    assert 5 < len(texts) < 25
    assert set(texts) <= originals
