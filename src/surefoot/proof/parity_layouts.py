"""The rows of the parity table: which layouts a recipe is run under."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from surefoot.config.model import Custom
from surefoot.config.optim import Adam, AdamW, Lion, Muon, OptimConfig, StableAdamW
from surefoot.config.parallel import PipelineConfig
from surefoot.config.run import RunConfig
from surefoot.parallel.precision import Precision

ADAM_EPS = 3e-4
"""Adam divides by the root of the second moment, so that rounding in an element whose gradient is small moves it by as much as a step of the
learning rate. With an epsilon of the size of the gradient's root mean square (a norm clipped to 0.1 over 100,000 parameters) an update is a
smooth function of its gradient, and what is left of a difference is the layout's."""
Z_LOSS = 1e-2
NOISE_EVERY = 2


@dataclass(frozen=True)
class Leg:
    """One process group's part of a run."""

    ranks: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ``parallel``."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One row of the table."""

    name: str
    legs: tuple[Leg, ...]
    """The run is stopped, saved and taken up again between them, after its second batch. None: the run as one process is held against a
    count by hand."""
    variant: str = ""
    """Further settings that the one-process run has too; see ``VARIANTS``."""
    damaged: bool = False
    """The newest checkpoint loses a bit between the legs."""
    quick: bool = False

    @property
    def title(self) -> str:
        """The name in the table."""
        return f"{self.variant}: {self.name}" if self.variant else self.name

    @property
    def products_whole(self) -> bool:
        """Whether a row's forward keeps its bits: one rank computes all of a layer, and no compiler rounds elsewhere."""
        settings = [leg.settings for leg in self.legs]
        apart = any(of.get("tp", 1) > 1 or of.get("cp", 1) > 1 or of.get("compile", "off") != "off" for of in settings)
        return bool(settings) and not apart

    @property
    def ranks(self) -> int:
        """Of its largest leg."""
        return max((leg.ranks for leg in self.legs), default=1)


def with_variant(config: RunConfig, variant: str) -> RunConfig:
    """The config with what a variant adds."""
    model, optim, log = config.model, config.optim, config.log
    match variant:
        case "":
            return config
        case "muon":
            optim = dataclasses.replace(optim, optimizer=Muon(newton_schulz="fp32"), decay="decoupled")
        case "z-loss":
            model = dataclasses.replace(model, loss=dataclasses.replace(model.loss, z_loss=Z_LOSS))
        case "untied":
            model = dataclasses.replace(model, tie_embeddings=not model.tie_embeddings)
        case "qk-norm":
            if not isinstance(model.attention, Custom):
                model = dataclasses.replace(model, attention=dataclasses.replace(model.attention, qk_norm=True))
                optim = dataclasses.replace(optim, qk_clip=0.0)
        case "noise scale":
            log = dataclasses.replace(log, noise_every=NOISE_EVERY)
        case _:
            raise ValueError(f"variant {variant!r}: one of {', '.join(VARIANTS)}")
    return dataclasses.replace(config, model=model, optim=optim, log=log)


VARIANTS = ("", "z-loss", "muon", "untied", "qk-norm", "noise scale")


def with_precision(config: RunConfig, precision: str) -> RunConfig:
    """The config in these numbers, its optimiser's epsilon at the size of gradients; in fp64 nothing is kept or iterated in fewer digits."""
    parallel = dataclasses.replace(config.parallel, precision=cast(Precision, precision))
    optim = dataclasses.replace(config.optim, optimizer=_smooth(config.optim, precision))
    if precision == "fp64":
        optim = dataclasses.replace(optim, moments="fp32")
    return dataclasses.replace(config, parallel=parallel, optim=optim)


def _smooth(optim: OptimConfig, precision: str) -> AdamW | Adam | StableAdamW | Lion | Muon:
    kind = optim.optimizer
    if isinstance(kind, Muon):
        others = kind.others if isinstance(kind.others, Lion) else dataclasses.replace(kind.others, eps=ADAM_EPS)
        kind = dataclasses.replace(kind, others=others)
        return dataclasses.replace(kind, newton_schulz="fp32") if precision == "fp64" else kind
    return kind if isinstance(kind, Lion) else dataclasses.replace(kind, eps=ADAM_EPS)


def laid_out(config: RunConfig, leg: Leg) -> RunConfig:
    """The config under the layout of a leg."""
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, **leg.settings))


def _cell(name: str, ranks: int = 1, variant: str = "", quick: bool = False, **settings: Any) -> Cell:
    return Cell(name=name, legs=(Leg(ranks, settings),), variant=variant, quick=quick)


def _stages(schedule: str, **more: Any) -> dict[str, Any]:
    return {"pipeline": PipelineConfig(schedule=schedule, **more), "micro_batch_size": 2}  # type: ignore[arg-type]


def _resumed(name: str, before: Leg, after: Leg, *, damaged: bool = False, quick: bool = False) -> Cell:
    return Cell(name=name, legs=(before, after), damaged=damaged, quick=quick)


_1F1B = _stages("1f1b")
_FSDP = {"data_parallel": "fsdp"}
_DP2_TP2_PP2 = Leg(8, {"tp": 2, "pp": 2, **_1F1B})

_ONE_PROCESS = (
    Cell(name="by hand", legs=(), quick=True),
    *(_cell(f"{16 // size} micro-batches", micro_batch_size=size, quick=size == 4) for size in (8, 4, 1)),
    _cell("recompute full", recompute="full"),
    _cell("recompute selective", recompute="selective", quick=True),
    _cell("compile", compile="on"),
    _resumed("save and resume", Leg(), Leg(), quick=True),
    _resumed("resume, newest checkpoint damaged", Leg(), Leg(), damaged=True),
)
_DATA = (
    _cell("ddp 2", 2, quick=True),
    _cell("ddp 4", 4),
    _cell("ddp 2, 4 micro-batches", 2, micro_batch_size=2),
    *(_cell(f"{kind} 2", 2, data_parallel=kind, quick=kind == "fsdp") for kind in ("zero1", "zero2", "fsdp")),
    *(
        _cell(f"{kind} 4, 2 micro-batches", 4, data_parallel=kind, micro_batch_size=2)
        for kind in ("zero1", "zero2", "fsdp")
    ),
    _cell("hsdp 2x2", 4, data_parallel="fsdp", shard_size=2),
    _cell("zero1 2x2", 4, data_parallel="zero1", shard_size=2),
    _cell("fsdp 2, recompute full", 2, data_parallel="fsdp", recompute="full"),
    _cell("zero1 2, offload", 2, data_parallel="zero1", offload=True),
    _cell("fsdp 2, offload", 2, data_parallel="fsdp", offload=True),
)
_TENSOR = (
    _cell("tp 2", 2, tp=2, quick=True),
    _cell("tp 4", 4, tp=4),
    _cell("tp 2, 4 micro-batches, recompute full", 2, tp=2, micro_batch_size=4, recompute="full"),
    _cell("ddp 2 x tp 2", 4, tp=2),
    _cell("fsdp 2 x tp 2", 4, data_parallel="fsdp", tp=2),
)
_CONTEXT = (
    _cell("cp 2 ring", 2, cp=2, quick=True),
    _cell("cp 4 ring", 4, cp=4),
    _cell("cp 2 all-to-all", 2, cp=2, cp_attention="all_to_all"),
    _cell("fsdp 2 x cp 2", 4, data_parallel="fsdp", cp=2),
)
_PIPELINE = (
    *(
        _cell(f"pp 2 {schedule}", 2, pp=2, quick=schedule == "1f1b", **_stages(schedule))
        for schedule in ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv", "dualpipev")
    ),
    _cell("pp 2 1f1b, layers 5 + 3", 2, pp=2, **_stages("1f1b", layers=(5, 3))),
    *(
        _cell(f"pp 4 {schedule}", 4, pp=4, **_stages(schedule))
        for schedule in ("1f1b", "interleaved", "zbv", "dualpipev")
    ),
    _cell("fsdp 2 x pp 2", 4, data_parallel="fsdp", pp=2, **_1F1B),
)
_PRODUCTS = (
    _cell("cp 2 x tp 2", 4, cp=2, tp=2),
    _cell("tp 2 x pp 2", 4, tp=2, pp=2, **_1F1B),
    _cell("cp 2 x pp 2", 4, cp=2, pp=2, **_1F1B),
    Cell(name="dp 2 x tp 2 x pp 2", legs=(_DP2_TP2_PP2,), quick=True),
    _cell("dp 2 x cp 2 x tp 2", 8, cp=2, tp=2),
    _cell("dp 2 x cp 2 x pp 2", 8, cp=2, pp=2, **_1F1B),
    _cell("cp 2 x tp 2 x pp 2", 8, cp=2, tp=2, pp=2, **_1F1B),
    _cell(
        "fsdp 2 x tp 2 x pp 2 zbv, recompute full",
        8,
        data_parallel="fsdp",
        tp=2,
        pp=2,
        recompute="full",
        **_stages("zbv"),
    ),
    _cell("zero2 2 x cp 2 x tp 2, 4 micro-batches", 8, data_parallel="zero2", cp=2, tp=2, micro_batch_size=2),
    _cell("hsdp 2x2 x tp 2", 8, data_parallel="fsdp", shard_size=2, tp=2),
)
_RESUMED = (
    _resumed("fsdp 2, saved and resumed", Leg(2, _FSDP), Leg(2, _FSDP)),
    _resumed("pp 2, saved and resumed", Leg(2, {"pp": 2, **_1F1B}), Leg(2, {"pp": 2, **_1F1B})),
    _resumed("1 rank, then fsdp 2", Leg(), Leg(2, _FSDP), quick=True),
    _resumed("fsdp 4, then 1 rank", Leg(4, _FSDP), Leg()),
    _resumed("ddp 2, then tp 2", Leg(2), Leg(2, {"tp": 2})),
    _resumed("fsdp 2 x tp 2, then zero1 2", Leg(4, {**_FSDP, "tp": 2}), Leg(2, {"data_parallel": "zero1"})),
    _resumed("pp 2, then cp 2", Leg(2, {"pp": 2, **_1F1B}), Leg(2, {"cp": 2})),
    _resumed("dp 2 x tp 2 x pp 2, then fsdp 2", _DP2_TP2_PP2, Leg(2, _FSDP)),
    _resumed("fsdp 2, then dp 2 x tp 2 x pp 2", Leg(2, _FSDP), _DP2_TP2_PP2),
)
_FEW: dict[str, tuple[int, dict[str, Any]]] = {
    "4 micro-batches": (1, {"micro_batch_size": 4}),
    "ddp 2": (2, {}),
    "zero2 2, 4 micro-batches": (2, {"data_parallel": "zero2", "micro_batch_size": 2}),
    "fsdp 2, 4 micro-batches": (2, {"data_parallel": "fsdp", "micro_batch_size": 2}),
    "fsdp 2 x tp 2": (4, {"data_parallel": "fsdp", "tp": 2}),
    "tp 2": (2, {"tp": 2}),
    "tp 4": (4, {"tp": 4}),
    "cp 2 ring": (2, {"cp": 2}),
    "cp 2 all-to-all": (2, {"cp": 2, "cp_attention": "all_to_all"}),
    "pp 2 1f1b": (2, {"pp": 2, **_1F1B}),
    "pp 2 zbv": (2, {"pp": 2, **_stages("zbv")}),
    "dp 2 x tp 2 x pp 2": (8, {"tp": 2, "pp": 2, **_1F1B}),
}
_VARIED: dict[str, tuple[str, ...]] = {
    "z-loss": ("4 micro-batches", "tp 2", "cp 2 ring", "pp 2 1f1b", "dp 2 x tp 2 x pp 2"),
    "muon": (
        "4 micro-batches", "ddp 2", "zero2 2, 4 micro-batches", "fsdp 2, 4 micro-batches", "tp 2", "fsdp 2 x tp 2", "cp 2 ring",
        "pp 2 1f1b", "dp 2 x tp 2 x pp 2",
    ),
    "untied": ("fsdp 2, 4 micro-batches", "tp 4", "pp 2 zbv", "dp 2 x tp 2 x pp 2"),
    "qk-norm": ("tp 2", "cp 2 all-to-all", "dp 2 x tp 2 x pp 2"),
    "noise scale": ("ddp 2", "fsdp 2 x tp 2", "cp 2 ring"),
}  # fmt: skip
CELLS: tuple[Cell, ...] = (
    *_ONE_PROCESS, *_DATA, *_TENSOR, *_CONTEXT, *_PIPELINE, *_PRODUCTS, *_RESUMED,
    Cell(name="by hand", legs=(), variant="z-loss"),
    Cell(name="by hand", legs=(), variant="muon"),
    *(_cell(name, _FEW[name][0], variant, **_FEW[name][1]) for variant, names in _VARIED.items() for name in names),
)  # fmt: skip
"""All rows."""
