"""Optimizers: how parameters move, given their gradients.

What may live here is the update rule and its state; when to step, on what data and with which
checkpoints belongs to the training room. `registry` finds all optimizers by name, torch's own
included; to add one, write a module with the class and `OPTIMIZERS = {"name": Class}`.
"""

from joma.optim.adamw8bit import AdamW8bit
from joma.optim.galore import GaLore, GaLoreAdamW
from joma.optim.stacked import StackedAdam, StackedSGD
from joma.optim.state import Optimizer

__all__ = ["AdamW8bit", "GaLore", "GaLoreAdamW", "Optimizer", "StackedAdam", "StackedSGD"]
