"""GaLore: optimizers whose state lives in a low-rank subspace of the gradients.

`GaLoreAdamW` is AdamW so; `GaLore` takes any optimizer of torch. `subspace` finds the subspaces;
the step itself is `joma.kernels.galore`.
"""

from joma.optim.galore._rules import GaLore, GaLoreAdamW
from joma.optim.galore._slot import ProjectedMatrix

OPTIMIZERS = {"galore-adamw": GaLoreAdamW}

__all__ = ["OPTIMIZERS", "GaLore", "GaLoreAdamW", "ProjectedMatrix"]
