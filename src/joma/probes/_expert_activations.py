"""Hidden activations of experts whose matrices are stacked in one parameter.

No module has these activations as its input, and a fused kernel may never store them. They are
computed once more, for a sample of the tokens, from what the experts are given: hidden states and
the experts chosen for each token.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


def expert_activations(
    module: nn.Module,
    inputs: Sequence[Any],
    options: Mapping[str, Any],
    some: Callable[[Tensor], Tensor],
) -> dict[int, Tensor] | None:
    """Return the hidden activations of every expert that was chosen, (tokens, nodes) each.

    Args:
        module: holds the experts, as transformers writes them.
        inputs: what it is called with.
        options: the same by name.
        some: picks the sampled tokens from (tokens, …).

    Returns:
        None where the module is of another kind.
    """
    given: Any = module  # transformers says of each what its matrices look like
    lower = module._parameters.get("gate_up_proj", module._parameters.get("up_proj"))
    gated = getattr(given, "has_gate", True) and hasattr(given, "_apply_gate")
    activation = given._apply_gate if gated else getattr(given, "act_fn", None)
    if lower is None or lower.ndim != 3 or activation is None:
        return None
    if not hasattr(given, "is_transposed"):
        return None
    hidden = inputs[0] if inputs else options.get("hidden_states")
    chosen = _chosen(inputs, options)
    if not isinstance(hidden, Tensor) or chosen is None:
        return None
    hidden = hidden.reshape(-1, hidden.shape[-1])
    hidden, chosen = some(hidden), some(chosen.reshape(len(hidden), -1))
    bias = module._parameters.get("gate_up_proj_bias", module._parameters.get("up_proj_bias"))
    made: dict[int, Tensor] = {}
    with torch.no_grad():
        for expert in chosen.unique().tolist():
            if not 0 <= expert < len(lower):
                continue
            rows = hidden[(chosen == expert).any(-1)]
            matrix = lower[expert].T if given.is_transposed else lower[expert]
            first = functional.linear(rows, matrix, None if bias is None else bias[expert])
            made[expert] = activation(first)
    return made


def _chosen(inputs: Sequence[Any], options: Mapping[str, Any]) -> Tensor | None:
    """The numbers of the experts chosen for each token."""
    every = [*inputs[1:], *options.values()]
    whole = [it for it in every if isinstance(it, Tensor) and not it.is_floating_point()]
    return whole[0] if whole else None
