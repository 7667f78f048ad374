"""What a run says about itself once: its size and data at the start, yardsticks and samples at the end.

Each is an event of the run folder, so that console, summary and report tell the same from the folder alone.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Self

from surefoot.monitor.store import RunStore
from surefoot.monitor.wording import duration, short


@dataclass(frozen=True, kw_only=True)
class Fact:
    """Something that is written as one event and read back as it was."""

    kind: ClassVar[str]

    def write(self, store: RunStore, batch_index: int = 0, step: int = 0) -> None:
        """As an event of the attempt under way."""
        store.write_event(self.kind, batch_index, step, **asdict(self))

    @classmethod
    def read(cls, event: Mapping[str, Any]) -> Self:
        """From the event that ``write`` made."""
        return cls(**{field.name: event[field.name] for field in fields(cls) if field.name in event})


@dataclass(frozen=True, kw_only=True)
class RunFacts(Fact):
    """The first line of a run."""

    kind: ClassVar[str] = "facts"
    recipe: str
    model: str
    """One phrase, ``6 layers, d_model 192``."""
    num_params: int
    tokens: int
    """Of the whole run; 0 where its clock decides."""
    steps: int
    """Likewise."""
    bound_s: float = 0.0
    """Training time that bounds the run; 0 where it is bounded by something else."""
    batch_tokens: int
    """Of the first batch."""
    precision: str
    device: str
    """One phrase, ``cpu, 2 threads``."""
    data_fingerprint: str
    config_fingerprint: str
    folder: str

    def line(self) -> str:
        """Model, parameters, tokens, batch, precision, fingerprints of data and config, run folder."""
        length = f"{short(self.tokens)} tokens in {self.steps:,} steps" if self.steps else duration(self.bound_s)
        return (
            f"{self.recipe}: {self.model}, {short(self.num_params)} parameters · {length} of "
            f"{short(self.batch_tokens)}{'' if self.steps else ' tokens a step'} · {self.precision} on {self.device} · "
            f"data {self.data_fingerprint[:8]} · config {self.config_fingerprint[:8]} · {self.folder}"
        )


@dataclass(frozen=True, kw_only=True)
class Yardstick(Fact):
    """What general-purpose compressors need for the same held-out bytes."""

    kind: ClassVar[str] = "yardstick"
    domain: str
    num_bytes: int
    zlib_bits_per_byte: float
    """zlib at level 9."""
    xz_bits_per_byte: float
    """xz at its default preset 6."""


@dataclass(frozen=True, kw_only=True)
class Sample(Fact):
    """A continuation drawn from the model at the end."""

    kind: ClassVar[str] = "sample"
    domain: str
    prompt: str
    text: str
