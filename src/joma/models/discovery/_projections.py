"""How a module stores its matrix: plainly, transposed, with LoRA, or parametrized."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from joma.models.parts import LowRank

READABLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""The types of numbers whose singular values can be computed."""

_WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module")


@dataclass(frozen=True)
class Projection:
    """The matrix of one module.

    Args:
        path: the module's path, wrappers left out.
        name: the full name of the stored parameter.
        out: how many rows the matrix has.
        inputs: how many columns.
        transposed: whether it is stored as (in, out).
        updates: LoRA's updates.
        computed: the path of the module that computes it, where it is not stored as it is.
        stored: the parameters it is computed from.
        why_not: why it cannot be measured; "" where it can.
        holder: the full path of the module whose output is the product; "" where there is none.
    """

    path: str
    name: str
    out: int
    inputs: int
    transposed: bool = False
    updates: tuple[LowRank, ...] = ()
    computed: str | None = None
    stored: tuple[str, ...] = ()
    why_not: str = ""
    holder: str = ""


def reader_path(path: str) -> str:
    """Return a path without the wrappers of checkpointing, compilation and sharding."""
    return ".".join(part for part in path.split(".") if part not in _WRAPPERS)


def join(*parts: str) -> str:
    """Return the path of a part within a path."""
    return ".".join(part for part in parts if part)


class Child(NamedTuple):
    """A module inside of another, wrappers taken off.

    Attributes:
        module: the module.
        path: its full path.
        projection: how it stores its matrix; None where it holds none.
    """

    module: nn.Module
    path: str
    projection: Projection | None


def children(module: nn.Module, path: str) -> dict[str, Child]:
    """Return the parts of a module and the parts of those, by their relative paths in lower case.

    Wrappers on the way are passed.
    """
    found: dict[str, Child] = {}

    def add(holder: nn.Module, where: str, before: str = "") -> None:
        for name, inside in holder._modules.items():
            key = before + name.lower()
            if inside is not None and key not in found:
                own, full = unwrapped(inside, join(where, name))
                found[key] = Child(own, full, projection_of(own, full))
                if not before:
                    add(own, full, f"{key}.")

    add(*unwrapped(module, path))
    return found


def unwrapped(module: nn.Module, path: str) -> tuple[nn.Module, str]:
    """Return the module inside of wrappers."""
    while inside := next((w for w in _WRAPPERS if w in module._modules), None):
        wrapped = module._modules[inside]
        if wrapped is None:
            break
        module, path = wrapped, join(path, inside)
    return module, path


def projection_of(module: nn.Module, path: str) -> Projection | None:
    """Return how a module stores its matrix; None where it holds none."""
    if isinstance(saved := module._modules.get("modules_to_save"), nn.ModuleDict):  # peft
        return _trained_copy(module, saved, path)
    base = module._modules.get("base_layer")
    if base is not None:  # a layer of peft
        found = projection_of(base, join(path, "base_layer"))
        return None if found is None else _with_updates(found, module, path)
    own = module._parameters.get("weight")
    if own is not None:
        return _described(module, path, join(path, "weight"), own)
    return _computed(module, path)


def parameter_projection(path: str, name: str, parameter: Tensor) -> Projection | None:
    """Return a matrix that is a parameter of its module itself, as `in_proj_weight` is."""
    why_not = unreadable(parameter)
    if not why_not and parameter.ndim != 2:
        return None
    out, inputs = (0, 0) if why_not else parameter.shape
    return Projection(reader_path(join(path, name)), join(path, name), out, inputs, why_not=why_not)


def unreadable(parameter: Tensor) -> str:
    """Return why a parameter cannot be measured, "" where it can."""
    if is_lazy(parameter):
        return "it has no shape before the model has run once (a lazy module)"
    if parameter.is_complex():
        return "its numbers are complex"
    if parameter.dtype not in READABLE:
        return f"it is stored as {parameter.dtype}: quantized weights are not read"
    return ""


def _described(module: nn.Module, path: str, name: str, weight: Tensor) -> Projection | None:
    why_not = unreadable(weight)
    if why_not:
        return Projection(reader_path(path), name, 0, 0, why_not=why_not)
    if weight.ndim > 2 and all(extent == 1 for extent in weight.shape[2:]):
        out, inputs = weight.shape[:2]
    elif weight.ndim == 2:
        out, inputs = weight.shape
    else:
        return None
    transposed = type(module).__name__ == "Conv1D"
    if transposed:
        out, inputs = inputs, out
    return Projection(reader_path(path), name, out, inputs, transposed, holder=path)


def _computed(module: nn.Module, path: str) -> Projection | None:
    """Return a matrix made from other parameters: normalised, pruned or parametrized."""
    if parametrize.is_parametrized(module, "weight"):
        inside: Any = module.parametrizations
        own = inside["weight"].named_parameters(prefix=join(path, "parametrizations", "weight"))
        weight: Tensor | None = getattr(inside["weight"], "original", None)
        if weight is None:
            originals = [getattr(inside["weight"], f"original{i}", None) for i in range(2)]
            shaped = [it for it in originals if isinstance(it, Tensor)]
            weight = max(shaped, key=Tensor.numel, default=None)
        stored = tuple(name for name, _ in own)
    else:
        ends = ("_orig", "_v", "_bar")  # pruning and the older weight and spectral normalisation
        named = {f"weight{end}": module._parameters.get(f"weight{end}") for end in ends}
        weight = next((it for it in named.values() if it is not None), None)
        stored = tuple(
            join(path, name) for name in module._parameters if name.startswith("weight_")
        )
    if weight is None or not stored:
        return None
    found = _described(module, path, stored[0], weight)
    return None if found is None else replace(found, computed=path, stored=stored)


def _with_updates(found: Projection, layer: nn.Module, path: str) -> Projection:
    """Return a layer of peft: its base and the updates that are active."""
    shown = reader_path(path)
    found = replace(found, path=shown, holder=path)
    transposed = found.transposed or bool(getattr(layer, "fan_in_fan_out", False))
    if transposed and not found.transposed:
        found = replace(found, transposed=True, out=found.inputs, inputs=found.out)
    if bool(getattr(layer, "disable_adapters", False)):
        return found
    merged = set(getattr(layer, "merged_adapters", ()) or ())
    updates = []
    for adapter in _active(layer):
        if adapter in merged:
            continue  # its update is in the base already
        update = _low_rank(layer, adapter, path)
        if isinstance(update, str):
            return replace(found, why_not=update)
        if update is not None:
            updates.append(update)
    return replace(found, updates=tuple(updates))


def _low_rank(layer: nn.Module, adapter: str, path: str) -> LowRank | str | None:
    modules, scaling = layer._modules, getattr(layer, "scaling", None)
    for down, up, template in (
        ("lora_A", "lora_B", "{0}.{1}.weight"),
        ("lora_embedding_A", "lora_embedding_B", "{0}.{1}"),
    ):
        if not _holds(modules.get(down), adapter) or not _holds(modules.get(up), adapter):
            continue
        if _holds(modules.get("lora_magnitude_vector"), adapter):
            return f"its adapter {adapter!r} is DoRA, whose effective weight is not computed"
        if not isinstance(scaling, Mapping) or adapter not in scaling:
            return f"its adapter {adapter!r} does not say how its update is scaled"
        names = [join(path, template.format(part, adapter)) for part in (down, up)]
        return LowRank(names[0], names[1], float(scaling[adapter]), down != "lora_A")
    other = any(_holds(inside, adapter) for inside in modules.values())
    return f"its adapter {adapter!r} is not LoRA" if other else None


def _holds(inside: nn.Module | None, key: str) -> bool:
    return isinstance(inside, nn.ModuleDict | nn.ParameterDict) and key in inside


def _active(layer: nn.Module) -> tuple[str, ...]:
    named = getattr(layer, "active_adapters", None) or getattr(layer, "active_adapter", None)
    if named is None:
        inside = layer._modules.get("lora_A")
        return tuple(inside) if isinstance(inside, nn.ModuleDict) else ()
    if isinstance(named, str):
        return (named,)
    return tuple(named) if isinstance(named, Iterable) else ()


def _trained_copy(module: nn.Module, saved: nn.ModuleDict, path: str) -> Projection | None:
    """Return a module of which peft trains a copy: the copy where it is used, else the original."""
    chosen = next((name for name in _active(module) if name in saved), None)
    if chosen is None or bool(getattr(module, "disable_adapters", False)):
        inside, name = module._modules.get("original_module"), "original_module"
    else:
        inside, name = saved[chosen], join("modules_to_save", chosen)
    if inside is None:
        return None
    found = projection_of(inside, join(path, name))
    return None if found is None else replace(found, path=reader_path(path))
