"""The run folder: the only thing that passes between making numbers and showing them.

A run folder holds `config.json` (what was asked for), `environment.json` (versions, device,
commit, command line), `metrics/part-*.parquet` (what was measured, step by step),
`tables/NAME.parquet`, `figures/`, `checkpoints/step-*.safetensors`, other small `NAME.json` files
and `manifest.json` (the files the run owns, with checksums). Anything written is written whole or
not at all, and the files of an earlier run are never removed. What may live here is reading,
writing, resuming, listing and comparing such folders; no mathematics, no drawing, no torch.
"""

from joma.runs._checkpoints import Checkpoint, Checkpoints, GivenUpError, LatestCheckpoint
from joma.runs._folder import check_out, check_restart, is_damaged_run, is_run
from joma.runs._lock import is_locked
from joma.runs._metrics import Metrics
from joma.runs._read import (
    Curve,
    TableDifference,
    TableKind,
    compare_metrics,
    compare_tables,
    curves_of,
    loss_curves,
    read,
)
from joma.runs._run import Existing, Run, default_folder, differing
from joma.runs._state import (
    RecordedFindings,
    RunCondition,
    RunState,
    RunSummary,
    condition_of,
    list_runs,
    read_findings,
    state_of,
)

__all__ = [
    "Checkpoint",
    "Checkpoints",
    "Curve",
    "Existing",
    "GivenUpError",
    "LatestCheckpoint",
    "Metrics",
    "RecordedFindings",
    "Run",
    "RunCondition",
    "RunState",
    "RunSummary",
    "TableDifference",
    "TableKind",
    "check_out",
    "check_restart",
    "compare_metrics",
    "compare_tables",
    "condition_of",
    "curves_of",
    "default_folder",
    "differing",
    "is_damaged_run",
    "is_locked",
    "is_run",
    "list_runs",
    "loss_curves",
    "read",
    "read_findings",
    "state_of",
]
