"""Series of checkpoints of one training: where they are, and whether they can be believed.

Public series are known to hold repeated weights and weights of other steps, so `verify` checks all
checkpoints before anything is read off their curves. It compares fingerprints (`fingerprint`),
which `judge` turns into findings.
"""

from joma.common.renamed import renamed
from joma.models._schedule import PYTHIA
from joma.models.series._fingerprint import (
    SKETCH_SIZE,
    Fingerprint,
    fingerprint,
    kept_fingerprint,
    settings_hashes,
)
from joma.models.series._integrity import Integrity, Neighbours, SeriesProblem, judge
from joma.models.series._ordering import misplaced
from joma.models.series._series import (
    Progress,
    Series,
    SeriesCheckpoint,
    check_some,
    not_there,
    reason,
    step_of,
    verify,
)

__all__ = [
    "PYTHIA",
    "SKETCH_SIZE",
    "Fingerprint",
    "Integrity",
    "Neighbours",
    "Progress",
    "Series",
    "SeriesCheckpoint",
    "SeriesProblem",
    "check_some",
    "fingerprint",
    "judge",
    "kept_fingerprint",
    "misplaced",
    "not_there",
    "reason",
    "settings_hashes",
    "step_of",
    "verify",
]

__getattr__ = renamed(__name__, {"Checkpoint": "SeriesCheckpoint", "Finding": "SeriesProblem"})
