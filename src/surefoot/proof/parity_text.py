"""Texts of our own for parity: short ones of which a row holds several, and long ones that span rows; and a config that reads them."""

import dataclasses
import random
from pathlib import Path

from surefoot.config.data import Exclusion, SourceConfig, TextFiles
from surefoot.config.run import RunConfig
from surefoot.data.build import prepare
from surefoot.data.loader import Loader

DOCUMENTS = 48
"""Of each source."""
LENGTHS = (3, 9, 20, 33, 150, 60)
"""Letters of texts, in turn: a row of 64 holds several of the first, and the fifth spans three rows."""
LETTERS = "etaoin shrdlu.\n"


def write_texts(folder: Path, name: str) -> None:
    """The texts of one source; the same bytes for the same name."""
    draw = random.Random(name)
    (folder / name).mkdir(parents=True, exist_ok=True)
    for number in range(DOCUMENTS):
        length = LENGTHS[number % len(LENGTHS)] + draw.randrange(9)
        text = f"{name[:1]}{number} " + "".join(draw.choice(LETTERS) for _ in range(length))
        (folder / name / f"{number:03d}.txt").write_text(text)


def reading(config: RunConfig, folder: Path) -> RunConfig:
    """The config with every source replaced by texts of our own, written and tokenised below ``folder``, and one document excluded from
    the second batch on, which holds it."""
    sources: list[SourceConfig] = []
    for source in config.data.sources:
        write_texts(folder / "texts", source.name)
        sources.append(dataclasses.replace(source, documents=TextFiles(glob=f"{folder}/texts/{source.name}/*.txt")))
    data = dataclasses.replace(config.data, sources=tuple(sources), exclude=(), cache_dir=str(folder / "shards"))
    loader = Loader(data, prepare(data, num_workers=1), config.seed)
    source_number, _, row = loader.sample_ids(1)[0].tolist()
    longest = max(loader.row_documents(source_number, row), key=lambda span: span.stop - span.start)
    exclusion = Exclusion(document=longest.document, from_batch=1)
    return dataclasses.replace(config, data=dataclasses.replace(data, exclude=(exclusion,)))
