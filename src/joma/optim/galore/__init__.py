"""GaLore: optimizers whose state lives in a low-rank subspace of the gradients.

`GaLoreAdamW` is AdamW so; `GaLore` takes any optimizer of torch. `selection` says which parameters
are projected, `subspace` how the subspace is chosen.
"""

from joma.optim.galore._subspaces import ProjectedMatrix
from joma.optim.galore.adamw import GaLoreAdamW
from joma.optim.galore.wrapped import GaLore

OPTIMIZERS = {"galore-adamw": GaLoreAdamW}

__all__ = ["OPTIMIZERS", "GaLore", "GaLoreAdamW", "ProjectedMatrix"]
