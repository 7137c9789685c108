"""Names that were replaced are still found, with a warning."""

import importlib

import pytest

RENAMED = [
    ("joma.experiments", "Choice", "ChoiceOption"),
    ("joma.experiments.claims", "Measurement", "ClaimMeasurement"),
    ("joma.experiments.claims", "Verdict", "ClaimVerdict"),
    ("joma.models", "Attention", "AttentionPart"),
    ("joma.models", "Block", "BlockPart"),
    ("joma.models.series", "Checkpoint", "SeriesCheckpoint"),
    ("joma.models.series", "Finding", "SeriesProblem"),
    ("joma.probes.metrics", "Estimate", "BoundedValue"),
    ("joma.train.language", "Estimate", "TrainingEstimate"),
    ("joma.theory.nonlinear", "Fit", "Eqn6Fit"),
    ("joma.theory.scan_snap", "Corpus", "ScanSnapCorpus"),
    ("joma.theory.scan_snap", "Trajectory", "ScanSnapTrajectory"),
]


@pytest.mark.parametrize(("module", "old", "new"), RENAMED)
def test_an_old_name_is_the_new_one_with_a_warning(module: str, old: str, new: str) -> None:
    found = importlib.import_module(module)
    with pytest.warns(DeprecationWarning, match=f"{old} is deprecated, use {new}"):
        assert getattr(found, old) is getattr(found, new)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(AttributeError, match=r"'joma\.models' has no attribute 'Nothing'"):
        importlib.import_module("joma.models").Nothing  # noqa: B018
