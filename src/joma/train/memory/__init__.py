"""What training a model takes of a GPU's memory, before anything is allocated.

`estimate_memory` builds the model on the meta device, makes the passes of a training step and the
steps of the optimizer there, and adds up what they would allocate.
"""

from joma.train.memory._estimate import (
    CARDS,
    PARTS,
    MemoryEstimate,
    TrainingSetup,
    card_memory,
    default_rank,
    estimate_memory,
)
from joma.train.memory._optimizers import OPTIMIZERS, Cost, ProjectionSettings, parameter_costs

__all__ = [
    "CARDS",
    "OPTIMIZERS",
    "PARTS",
    "Cost",
    "MemoryEstimate",
    "ProjectionSettings",
    "TrainingSetup",
    "card_memory",
    "default_rank",
    "estimate_memory",
    "parameter_costs",
]
