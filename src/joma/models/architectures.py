"""Where the embedding, queries, keys and the MLP live in the transformers people bring.

One `Architecture` per family is all there is to know: parameter names and module paths relative to
the base model, with "{layer}" where the number of the block stands. `architecture_of` finds the map
of a model, `weights` finds every weight it names among the names of a model or of a file, so that a
file need not be loaded to be measured, and `register` adds a map of one's own.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from torch import nn

from joma.errors import JomaError
from joma.models._architecture import (
    LAYER,
    ROLES,
    Architecture,
    Config,
    Part,
    Place,
    Rows,
    Weight,
    config_of,
    get,
)
from joma.models._maps import MAPS
from joma.models._module_tree import module_tree

__all__ = [
    "LAYER",
    "ROLES",
    "Architecture",
    "Config",
    "Part",
    "Place",
    "Rows",
    "Weight",
    "architecture_of",
    "how_to_map",
    "known_architecture",
    "module_at",
    "module_path",
    "number_of_layers",
    "prefix_of",
    "register",
    "registered_for",
    "weights",
]

_ARCHITECTURES = list(MAPS)


def weights(
    names: Iterable[str],
    architecture: Architecture,
    roles: Sequence[str] = ROLES,
    heads: int | None = None,
) -> list[Weight]:
    """Every weight of the given roles, the embedding first and then block by block.

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
                f"model does not have; its names look like {_some(names)}"
            )
    by_head = any(isinstance(place.part, Part) and place.part.by_head for _, place in places)
    if by_head and (heads is None or heads < 1):
        raise JomaError(
            f"heads must be the model's number of heads, got {heads}: {architecture.name} stores "
            "queries and keys in one matrix, head by head"
        )
    return [replace(weight, heads=heads) for weight in whole + blocks]


def prefix_of(names: Iterable[str], architecture: Architecture) -> str:
    """What stands before the base model's names in these names."""
    names = list(names)
    patterns = [_pattern(place.name) for _, place in architecture.places()]
    for prefix in architecture.prefixes:
        inside = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
        if any(pattern.fullmatch(name) for pattern in patterns for name in inside):
            return prefix
    raise JomaError(
        f"no parameter is named as the map of {architecture.name} has it, such as "
        f"{architecture.prefixes[-1]}{architecture.mlp_lower.name}; names look like {_some(names)}"
    )


def number_of_layers(names: Iterable[str], architecture: Architecture) -> int:
    """How many blocks the names tell of.

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
    """The module at a path of the model's map, such as `architecture.attention`, in block `layer`.

    Args:
        model: the model, with or without a head.
        path: relative to the base model, "{layer}" where the block's number stands.
        layer: that number.
        architecture: the model's map; found by `architecture_of` unless given.
    """
    return model.get_submodule(module_path(model, path, layer, architecture=architecture))


def module_path(
    model: nn.Module,
    path: str,
    layer: int | None = None,
    *,
    architecture: Architecture | None = None,
) -> str:
    """The full name of the module `module_at` finds, as `named_modules` has it."""
    if architecture is None:
        architecture = architecture_of(model)
    if (LAYER in path) != (layer is not None):
        raise JomaError(f"layer must be given where the path has {LAYER}, got {layer} and {path}")
    names = (name for name, _ in model.named_parameters(remove_duplicate=False))
    return prefix_of(names, architecture) + path.replace(LAYER, str(layer))


class UnknownArchitectureError(JomaError):
    """No map for an architecture; the message has lines: the module tree, and a map to fill in."""

    verbatim = True


def architecture_of(model_or_config: nn.Module | Config) -> Architecture:
    """The map of a model, or of a configuration before anything is loaded.

    Raises:
        UnknownArchitectureError: there is none; it shows the module tree and how to write one.
    """
    architecture = known_architecture(model_or_config)
    if architecture is not None:
        return architecture
    known = sorted({name for known in _ARCHITECTURES for name in known.model_types})
    raise UnknownArchitectureError(
        f"no map says where the weights of {_model_type(model_or_config)!r} are; known are "
        f"{', '.join(known)}.\n" + how_to_map(model_or_config)
    )


def how_to_map(model_or_config: nn.Module | Config) -> str:
    """Return a model's tree and how to write its map, for the message of an error."""
    tree = _tree_of(model_or_config)
    return (
        f"{tree}Write its map{' from this tree' if tree else ''} in Python, before the model is "
        "used, or in a file for joma probe --map:\n"
        + _EXAMPLE.replace("MODEL_TYPE", _model_type(model_or_config))
    )


def registered_for(model_or_config: nn.Module | Config) -> Architecture | None:
    """Return the map that `register` added for this kind of model, None where none was."""
    model_type = _model_type(model_or_config)
    own = [known for known in _ARCHITECTURES if known not in MAPS]
    return next((known for known in reversed(own) if model_type in known.model_types), None)


def known_architecture(model_or_config: nn.Module | Config) -> Architecture | None:
    """Return the map of a model or configuration, None where there is none."""
    model_type = _model_type(model_or_config)
    known = reversed(_ARCHITECTURES)
    return next((it for it in known if model_type in it.model_types), None)


def register(architecture: Architecture) -> None:
    """Adds a map; for a `model_type` that has one already, the newer is used."""
    _ARCHITECTURES.append(architecture)


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


def _tree_of(model_or_config: nn.Module | Config) -> str:
    if isinstance(model_or_config, nn.Module):
        return module_tree(model_or_config) + "\n"
    try:
        import torch
        from transformers import AutoConfig, AutoModel

        config = model_or_config
        if isinstance(config, Mapping):
            config = AutoConfig.for_model(**config)
        with torch.device("meta"):
            config._attn_implementation = None  # not a configuration's to say
            return module_tree(AutoModel.from_config(config, trust_remote_code=False)) + "\n"
    except Exception:  # a tree that cannot be drawn must not hide the message it is drawn for
        return ""


def _model_type(model_or_config: nn.Module | Config) -> str:
    model_type = get(config_of(model_or_config), "model_type")
    return model_type if isinstance(model_type, str) else type(model_or_config).__name__


def _weight(role: str, layer: int | None, prefix: str, place: Place) -> Weight:
    name = prefix + place.name.replace(LAYER, str(layer))
    module = name.removesuffix(".weight")
    return Weight(role, layer, module if place.part is None else f"{module}[{role}]", name, place)


def _pattern(template: str) -> re.Pattern[str]:
    return re.compile(re.escape(template).replace(re.escape(LAYER), "[0-9]+"))


def _some(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)[:3]) or "nothing (there are none)"
