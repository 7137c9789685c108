"""Training: many networks as one program, checkpoints, and runs that go on where they stopped.

What may live here is how a step is made, repeated, recorded, watched and continued. Update rules
live in `joma.optim`, what is measured in `joma.probes`. `monitor` watches any training loop,
`findings` says in plain words what the recorded series show.
"""

from joma.train.ensemble import PRECISIONS, Ensemble
from joma.train.fit import Fit, Training, fit, fit_together

__all__ = ["PRECISIONS", "Ensemble", "Fit", "Training", "fit", "fit_together"]
