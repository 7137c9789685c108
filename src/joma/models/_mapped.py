"""What a hand-written map names, in the form in which discovery reports it."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from joma.models._architecture import LAYER, Architecture
from joma.models._found import Attention, Block, Found, Mlp
from joma.models._weight import Weight
from joma.models.architectures import prefix_of, weights


def found_by_map(
    model: nn.Module | Iterable[str], architecture: Architecture, config: Any = None
) -> Found:
    """Return what a hand-written map names.

    Args:
        model: the model, or the names of its parameters.
        architecture: the map.
        config: the configuration where names are given.

    Raises:
        ValueError: something the map names is not there.
    """
    if isinstance(model, nn.Module):
        names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        config = model
    else:
        names = list(model)
    heads, key_heads = architecture.head_counts(config) if config is not None else (None, None)
    prefix = prefix_of(names, architecture)
    embeddings, layers = [], dict[int, dict[str, Weight]]()
    for weight in weights(names, architecture, heads=heads):
        if weight.layer is None:
            embeddings.append(weight)
        else:
            layers.setdefault(weight.layer, {})[weight.role] = weight

    def path(template: str, layer: int) -> str:
        return prefix + template.replace(LAYER, str(layer))

    return Found(
        tuple(embeddings),
        tuple(
            Attention(
                path(architecture.attention, layer),
                layer,
                query=roles.get("query"),
                key=roles.get("key"),
                value=roles.get("value"),
                output=roles.get("output"),
                heads=heads,
                key_heads=key_heads,
            )
            for layer, roles in layers.items()
        ),
        tuple(
            Mlp(
                path(architecture.mlp_down, layer).rpartition(".")[0],
                layer,
                lower=roles.get("mlp_lower"),
                up=roles.get("mlp_up"),
                down=roles.get("mlp_down"),
                down_path=path(architecture.mlp_down, layer),
            )
            for layer, roles in layers.items()
        ),
        tuple(Block(path(architecture.layer, layer), layer) for layer in layers),
        {
            role: f"the map of {architecture.name} does not name it"
            for role in ("value", "output")
            if getattr(architecture, role) is None
        },
    )
