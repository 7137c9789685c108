"""Training a language model from a configuration, on one process or several.

What may live here is what `joma train` does for a causal model of transformers on a text: its
configuration and presets, its data, its steps with the monitor, and the export of a series of
models. The loop itself is `joma.train.loop`, which ensembles share; texts and tokenizers live in
`joma.data`, measurements in `joma.probes`.
"""

from joma.train.language._config import (
    PRESETS,
    CheckpointsSection,
    Config,
    DataSection,
    ModelSection,
    MonitorSection,
    OptimizerSection,
    TrainingSection,
    ValidationSection,
    changing,
    check_length,
    read_config,
)
from joma.train.language._estimate import TrainingEstimate, estimate
from joma.train.language._export import SERIES, series_folder
from joma.train.language._training import LanguageTraining, Trained, train
from joma.train.processes import FailedElsewhereError, Processes, joined

__all__ = [
    "PRESETS",
    "SERIES",
    "CheckpointsSection",
    "Config",
    "DataSection",
    "FailedElsewhereError",
    "LanguageTraining",
    "ModelSection",
    "MonitorSection",
    "OptimizerSection",
    "Processes",
    "Trained",
    "TrainingEstimate",
    "TrainingSection",
    "ValidationSection",
    "changing",
    "check_length",
    "estimate",
    "joined",
    "read_config",
    "series_folder",
    "train",
]
