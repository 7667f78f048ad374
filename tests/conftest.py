"""What all tests share: a small corpus of our own, and the config of a run of seconds on it."""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from surefoot.config.run import RunConfig
from surefoot.data.build import prepare
from surefoot.data.loader import Loader
from surefoot.proof.rehearsal import rehearsal, write_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(texts, shard cache), tokenised once per test process."""
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder / "texts")
    prepare(rehearsal(folder / "texts", folder / "cache").data)
    return folder / "texts", folder / "cache"


@pytest.fixture
def config(corpus: tuple[Path, Path]) -> RunConfig:
    return rehearsal(*corpus)


@pytest.fixture
def loader(config: RunConfig) -> Loader:
    return Loader(config.data, prepare(config.data), config.seed)


@pytest.fixture
def vary() -> Callable[..., RunConfig]:
    """Change settings by dotted key: vary(config, **{"parallel.precision": "bf16"})."""

    def change(config: RunConfig, **settings: object) -> RunConfig:
        for key, value in settings.items():
            *path, last = key.split(".")
            if path:
                part = getattr(config, path[0])
                config = dataclasses.replace(config, **{path[0]: dataclasses.replace(part, **{last: value})})
            else:
                config = dataclasses.replace(config, **{last: value})
        return config

    return change
