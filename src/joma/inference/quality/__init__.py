"""What a smaller cache costs: loss on a text, recall in generated tasks, the cost of one layer.

Everything takes a model and a policy of `joma.inference`, None for the plain model with the cache
of transformers.

- `text_loss`: loss of every token of some windows, cache bytes and tokens per second, in one pass.
- `TASKS`, `make_examples`, `task_score`: generated tasks that need one place of a long prompt.
- `layer_costs`: what it costs to cut one layer alone.
- `attention_profiles`: what the probes say of each layer beforehand.
"""

from joma.inference.quality.loss import LayerCosts, TextLoss, layer_costs, text_loss
from joma.inference.quality.profile import LayerProfile, attention_profiles
from joma.inference.quality.tasks import (
    TASKS,
    Example,
    TaskScore,
    make_examples,
    task_score,
)

__all__ = [
    "TASKS",
    "Example",
    "LayerCosts",
    "LayerProfile",
    "TaskScore",
    "TextLoss",
    "attention_profiles",
    "layer_costs",
    "make_examples",
    "task_score",
    "text_loss",
]
