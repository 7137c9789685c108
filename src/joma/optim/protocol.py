"""What every optimizer has, torch's own and ours."""

from collections.abc import Mapping
from typing import Any, Protocol


class Optimizer(Protocol):
    """The part of `torch.optim.Optimizer` that a training needs.

    The state may have tensors of any shape, numbers, texts, and lists and mappings of them.
    """

    def step(self) -> Any:
        """Move the parameters by their gradients."""
        ...

    def zero_grad(self) -> None:
        """Drop the gradients."""
        ...

    def state_dict(self) -> Mapping[str, Any]:
        """Return all that decides how the parameters move next."""
        ...

    def load_state_dict(self, state_dict: Any) -> None:
        """Return to a state that `state_dict` gave."""
        ...
