"""What a finished process tells the shell and the scheduler."""

DONE = 0
INTERNAL = 1
"""A fault of Surefoot itself."""
CONFIG = 2
"""The config or the command line is wrong."""
DATA = 3
"""The data cannot be read as told."""
ENVIRONMENT = 4
"""The machine lacks something: memory, disk, a device, a package."""
PREEMPTED = 75
"""Stopped by SIGTERM or SIGUSR1 with everything saved: requeue."""
GAVE_UP = 76
"""The guard stopped the run with a diagnosis."""
INTERRUPTED = 130
"""Stopped by Ctrl-C."""

MEANINGS: dict[int, str] = {
    DONE: "done",
    INTERNAL: "a fault of Surefoot itself",
    CONFIG: "wrong config or command line",
    DATA: "wrong data",
    ENVIRONMENT: "the machine lacks something",
    PREEMPTED: "preempted and saved: requeue",
    GAVE_UP: "the guard gave up",
    INTERRUPTED: "Ctrl-C",
}

ERRORS: dict[str, int] = {
    "surefoot.config.errors.ConfigError": CONFIG,
    "surefoot.model.parametrization.RoleError": CONFIG,
    "surefoot.model.parts.PartError": CONFIG,
    "surefoot.model.count.CountError": CONFIG,
    "surefoot.monitor.metrics.UnknownMetricError": CONFIG,
    "surefoot.train.stock.ResumeRefused": CONFIG,
    "surefoot.data.errors.DataError": DATA,
    "surefoot.interop.huggingface.HuggingFaceError": DATA,
    "surefoot.guard.ledger_row.LedgerError": ENVIRONMENT,
    "surefoot.parallel.digest.ReplicasDiffer": ENVIRONMENT,
    "surefoot.parallel.mesh.EnvironmentFault": ENVIRONMENT,
    "surefoot.train.manifest.CheckpointError": ENVIRONMENT,
    "builtins.ImportError": ENVIRONMENT,
    "builtins.MemoryError": ENVIRONMENT,
    "builtins.OSError": ENVIRONMENT,
    "builtins.KeyboardInterrupt": INTERRUPTED,
}
"""Exit code by the qualified name of an error, its bases included: by name, because importing some of them imports torch."""


def code_of(error: BaseException) -> int:
    """The exit code of the error that ended a command; one that nobody foresaw is a fault of Surefoot."""
    names = (f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__)
    return next((ERRORS[name] for name in names if name in ERRORS), INTERNAL)
