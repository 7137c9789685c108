"""Where the embedding, queries, keys and the MLP live in the transformers people bring.

One `Architecture` per family is all there is to know: parameter names and module paths relative to
the base model, with "{layer}" where the number of the block stands. `architecture_of` finds the map
of a model, `weights` finds every weight it names among the names of a model or of a file, so that a
file need not be loaded to be measured, and `register` adds a map of one's own.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from joma.errors import JomaError
from joma.models.architectures._map import (
    LAYER,
    ROLES,
    Architecture,
    Config,
    config_entry,
    known_maps,
    load_map,
)
from joma.models.model_weights import AttentionPart, BlockPart, Found, Mlp, Part, Place, Weight

__all__ = [
    "LAYER",
    "ROLES",
    "Architecture",
    "Config",
    "UnknownArchitectureError",
    "architecture_of",
    "config_entry",
    "found_by_map",
    "how_to_map",
    "known_architecture",
    "load_map",
    "module_at",
    "number_of_layers",
    "prefix_of",
    "register",
    "registered_for",
    "weights",
]

MAPS = known_maps()

_registered: list[Architecture] = []


class UnknownArchitectureError(JomaError):
    """No map for an architecture; the message has lines: the parameters, and a map to fill in."""

    verbatim = True


def architecture_of(model_or_config: nn.Module | Config) -> Architecture:
    """Return the map of a model, or of a configuration before anything is loaded.

    Raises:
        UnknownArchitectureError: there is none; it shows the parameters and how to write one.
    """
    architecture = known_architecture(model_or_config)
    if architecture is not None:
        return architecture
    known = sorted({name for known in (*MAPS, *_registered) for name in known.model_types})
    raise UnknownArchitectureError(
        f"no map says where the weights of {_model_type(model_or_config)!r} are; known are "
        f"{', '.join(known)}.\n" + how_to_map(model_or_config)
    )


def how_to_map(model_or_config: nn.Module | Config) -> str:
    """Return a model's parameters and how to write its map, for the message of an error."""
    names = _parameters_of(model_or_config)
    return (
        f"{names}Write its map{' from these names' if names else ''} in Python, before the model "
        "is used, or in a file for joma probe --map:\n"
        + _EXAMPLE.replace("MODEL_TYPE", _model_type(model_or_config))
    )


def registered_for(model_or_config: nn.Module | Config) -> Architecture | None:
    """Return the map that `register` added for this kind of model, None where none was."""
    model_type = _model_type(model_or_config)
    return next((it for it in reversed(_registered) if model_type in it.model_types), None)


def known_architecture(model_or_config: nn.Module | Config) -> Architecture | None:
    """Return the map of a model or configuration, None where there is none."""
    model_type = _model_type(model_or_config)
    known = (it for it in MAPS if model_type in it.model_types)
    return registered_for(model_or_config) or next(known, None)


def register(architecture: Architecture) -> None:
    """Add a map; for a `model_type` that has one already, the newer is used."""
    _registered.append(architecture)


_EXAMPLE = """\
    from joma.models import Architecture, Part, Place, register
    register(Architecture(
        name="MODEL_TYPE", model_types=("MODEL_TYPE",), prefixes=("", "model."),
        embedding=Place("embed_tokens.weight"),
        query=Place("layers.{layer}.self_attn.qkv.weight", Part(0, of=3)),  # one fused matrix
        key=Place("layers.{layer}.self_attn.qkv.weight", Part(1, of=3)),
        mlp_lower=Place("layers.{layer}.mlp.up.weight"),
        layer="layers.{layer}", attention="layers.{layer}.self_attn",
        mlp_down="layers.{layer}.mlp.down", heads="num_attention_heads",
    ))"""


def _parameters_of(model_or_config: nn.Module | Config) -> str:
    """Return names and shapes of a model's matrices, a line each; of all blocks the first's."""
    model = model_or_config
    if not isinstance(model, nn.Module):
        try:
            import torch
            from transformers import AutoConfig, AutoModel

            config = AutoConfig.for_model(**model) if isinstance(model, Mapping) else model
            with torch.device("meta"):
                config._attn_implementation = None  # not a configuration's to say
                model = AutoModel.from_config(config, trust_remote_code=False)
        except Exception:  # names that cannot be listed must not hide the message they are for
            return ""
    shapes: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        if not name.endswith("bias"):
            shapes.setdefault(_IN_NUMBERS.sub(LAYER, name), str(tuple(parameter.shape)))
    lines = [f"  {name} {shape}" for name, shape in shapes.items()]
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES:] = [f"  … and {len(lines) - _MOST_LINES} more"]
    return "\n".join([f"{type(model).__name__} has the parameters", *lines, ""])


_IN_NUMBERS = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)")
_MOST_LINES = 60


def _model_type(model_or_config: nn.Module | Config) -> str:
    model_type = config_entry(model_or_config, "model_type")
    return model_type if isinstance(model_type, str) else type(model_or_config).__name__


def weights(
    names: Iterable[str],
    architecture: Architecture,
    roles: Sequence[str] = ROLES,
    heads: int | None = None,
) -> list[Weight]:
    """Return every weight of the given roles, the embedding first and then block by block.

    Args:
        names: the parameters' full names, of a model (`named_parameters`) or of a file.
        architecture: the map.
        roles: which weights; a role the architecture does not have is left out.
        heads: the number of heads, needed where a fused matrix goes by head.

    Raises:
        ValueError: a weight the architecture names is not among the names.
    """
    names = set(names)
    prefix = prefix_of(names, architecture)
    places = architecture.places(roles)
    whole = [_weight(role, None, prefix, place) for role, place in places if role == "embedding"]
    blocks = [
        _weight(role, layer, prefix, place)
        for layer in range(number_of_layers(names, architecture))
        for role, place in places
        if role != "embedding"
    ]
    for weight in whole + blocks:
        if weight.name not in names:
            raise JomaError(
                f"the map of {architecture.name} has the {weight.role} at {weight.name}, which the "
                f"model does not have; its names are like {_some(names)}"
            )
    by_head = any(isinstance(place.part, Part) and place.part.by_head for _, place in places)
    if by_head and (heads is None or heads < 1):
        raise JomaError(
            f"heads must be the model's number of heads, got {heads}: {architecture.name} stores "
            "queries and keys in one matrix, head by head"
        )
    return [replace(weight, heads=heads) for weight in whole + blocks]


def prefix_of(names: Iterable[str], architecture: Architecture) -> str:
    """Return what stands before the base model's names in these names."""
    names = list(names)
    patterns = [_pattern(place.name) for _, place in architecture.places()]
    for prefix in architecture.prefixes:
        inside = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
        if any(pattern.fullmatch(name) for pattern in patterns for name in inside):
            return prefix
    raise JomaError(
        f"no parameter is named as the map of {architecture.name} has it, such as "
        f"{architecture.prefixes[-1]}{architecture.mlp_lower.name}; names are like {_some(names)}"
    )


def number_of_layers(names: Iterable[str], architecture: Architecture) -> int:
    """Return how many blocks the names tell of.

    Raises:
        ValueError: none, or the numbers of the blocks leave some out.
    """
    names = set(names)
    start = re.compile(
        re.escape(prefix_of(names, architecture))
        + re.escape(architecture.layer).replace(re.escape(LAYER), "([0-9]+)")
        + r"\."
    )
    layers = {int(match[1]) for name in names if (match := start.match(name))}
    missing = sorted(set(range(max(layers, default=0) + 1)) - layers)
    if missing:
        raise JomaError(
            f"the model has blocks {sorted(layers)} but none numbered {missing[0]}: "
            "a part of the checkpoint is missing"
        )
    return len(layers)


def module_at(
    model: nn.Module,
    path: str,
    layer: int | None = None,
    *,
    architecture: Architecture | None = None,
) -> nn.Module:
    """Return the module at a path of the model's map, such as `architecture.attention`.

    Args:
        model: the model, with or without a head.
        path: relative to the base model, "{layer}" where the block's number stands.
        layer: that number.
        architecture: the model's map; found by `architecture_of` unless given.
    """
    if architecture is None:
        architecture = architecture_of(model)
    if (LAYER in path) != (layer is not None):
        raise JomaError(f"layer must be given where the path has {LAYER}, got {layer} and {path}")
    names = (name for name, _ in model.named_parameters(remove_duplicate=False))
    return model.get_submodule(prefix_of(names, architecture) + path.replace(LAYER, str(layer)))


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

    def of(layer: int, *names: str) -> dict[str, Any]:
        """Return the weights of a layer as arguments of `AttentionPart` or `Mlp`."""
        return {name.removeprefix("mlp_"): layers[layer].get(name) for name in names}

    return Found(
        tuple(embeddings),
        tuple(
            AttentionPart(
                path(architecture.attention, layer),
                layer,
                **of(layer, "query", "key", "value", "output"),
                heads=heads,
                key_heads=key_heads,
            )
            for layer in layers
        ),
        tuple(
            Mlp(
                path(architecture.mlp_down, layer).rpartition(".")[0],
                layer,
                **of(layer, "mlp_lower", "mlp_up", "mlp_down"),
                down_path=path(architecture.mlp_down, layer),
            )
            for layer in layers
        ),
        tuple(BlockPart(path(architecture.layer, layer), layer) for layer in layers),
        {
            role: f"the map of {architecture.name} does not name it"
            for role in ("value", "output")
            if getattr(architecture, role) is None
        },
    )


def _weight(role: str, layer: int | None, prefix: str, place: Place) -> Weight:
    name = prefix + place.name.replace(LAYER, str(layer))
    module = name.removesuffix(".weight")
    return Weight(role, layer, module if place.part is None else f"{module}[{role}]", name, place)


def _pattern(template: str) -> re.Pattern[str]:
    return re.compile(re.escape(template).replace(re.escape(LAYER), "[0-9]+"))


def _some(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)[:3]) or "nothing (there are none)"
