"""GaLore: optimizers whose state lives in a low-rank subspace of the gradients.

`GaLoreAdamW` is AdamW so; `GaLore` takes any optimizer of torch. `subspace` finds the subspaces;
the step itself is `joma.kernels.galore`.
"""

from joma.optim.galore._adamw import GaLoreAdamW
from joma.optim.galore._optimizer import ProjectedMatrix
from joma.optim.galore._wrapped import GaLore

OPTIMIZERS = {"galore-adamw": GaLoreAdamW}

__all__ = ["OPTIMIZERS", "GaLore", "GaLoreAdamW", "ProjectedMatrix"]
