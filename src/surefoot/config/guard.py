"""What the guard may do."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """One rule so far: a non-finite loss or gradient norm is a skipped step."""

    max_consecutive_skips: int = 20
    """As many skipped steps in a row stop the run with a diagnosis (exit code 76)."""
    snapshots: int = 2
    """States kept in memory as rollback targets; 0 is none."""
    snapshot_every: int = 50
    """Batches between snapshots."""
    snapshot_budget_gib: float = 4.0
    """Most memory the snapshots of one rank may take; more is refused before the run starts."""
    certify_after: int = 50
    """Batches without a skipped step after which a checkpoint counts as certified."""
