"""Optimizers: how parameters move, given their gradients.

What may live here is the update rule and its state; when to step, on what data and with which
checkpoints belongs to the training room.
"""

from joma.optim.adam import StackedAdam
from joma.optim.sgd import StackedSGD

__all__ = ["StackedAdam", "StackedSGD"]
