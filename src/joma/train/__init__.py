"""Training: many networks as one program, language models, checkpoints, and resumed runs.

What may live here is how a step is made, repeated, recorded, watched and resumed: `loop` does it
for everything that is trained. Update rules live in `joma.optim`, measurements in `joma.probes`.
`monitor` watches any training loop, `findings` says in plain words what the recorded series show.
"""

from joma.train._checkpointing import CHECKPOINT_SECONDS
from joma.train.ensemble import PRECISIONS, Ensemble
from joma.train.loop import Fit, Training, fit

__all__ = ["CHECKPOINT_SECONDS", "PRECISIONS", "Ensemble", "Fit", "Training", "fit"]
