"""How modules store their matrices: plainly, transposed, with LoRA, or computed."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from joma.models.model_weights import LowRank

_READABLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module")
_COMPUTED_FROM = ("weight_orig", "weight_v", "weight_bar")
"""What pruning and the older weight and spectral normalisation compute a weight from."""


@dataclass(frozen=True)
class StoredMatrix:
    """The matrix of one module, (out, inputs).

    Args:
        path: the module's path, wrappers left out.
        name: the full name of the stored parameter.
        out: how many rows the matrix has.
        inputs: how many columns.
        transposed: whether it is stored as (in, out).
        updates: LoRA's updates.
        computed: the path of the module that computes it, where it is not stored as it is.
        stored: the parameters it is computed from.
        holder: the full path of the module whose output is the product.
    """

    path: str
    name: str
    out: int
    inputs: int
    transposed: bool = False
    updates: tuple[LowRank, ...] = ()
    computed: str | None = None
    stored: tuple[str, ...] = ()
    holder: str = ""


def reader_path(path: str) -> str:
    """Return a path without the wrappers of checkpointing, compilation and sharding."""
    return ".".join(part for part in path.split(".") if part not in _WRAPPERS)


def join(*parts: str) -> str:
    """Return the path of a part within a path."""
    return ".".join(part for part in parts if part)


class NotMeasuredError(Exception):
    """A matrix is there and cannot be measured; the message says why."""


def check_readable(parameter: Tensor) -> None:
    """Raise `NotMeasuredError` for a parameter whose singular values cannot be computed."""
    if is_lazy(parameter):
        raise NotMeasuredError("it has no shape before the model has run once (a lazy module)")
    if parameter.is_complex():
        raise NotMeasuredError("its numbers are complex")
    if parameter.dtype not in _READABLE:
        raise NotMeasuredError(f"it is stored as {parameter.dtype}: quantized weights are not read")


def matrix_of(module: nn.Module, path: str) -> StoredMatrix | None:
    """Return the matrix of a module; None where it holds none.

    Raises:
        NotMeasuredError: It cannot be measured.
    """
    if isinstance(saved := module._modules.get("modules_to_save"), nn.ModuleDict):  # peft
        return _trained_copy(module, saved, path)
    base = module._modules.get("base_layer")
    if base is not None:  # a layer of peft
        found = matrix_of(base, join(path, "base_layer"))
        return None if found is None else _with_updates(found, module, path)
    own = module._parameters.get("weight")
    if own is None:
        return _computed(module, path)
    return matrix_stored_as(own, join(path, "weight"), path, type(module).__name__ == "Conv1D")


def matrix_stored_as(
    weight: Tensor, name: str, path: str, transposed: bool = False
) -> StoredMatrix | None:
    """Return a parameter as a matrix; None where it is none, nor a convolution of width one."""
    check_readable(weight)
    if weight.ndim < 2 or any(size != 1 for size in weight.shape[2:]):
        return None
    out, inputs = weight.shape[1::-1] if transposed else weight.shape[:2]
    return StoredMatrix(reader_path(path), name, out, inputs, transposed, holder=path)


def _computed(module: nn.Module, path: str) -> StoredMatrix | None:
    """Return a matrix made from other parameters: normalised, pruned or parametrized."""
    if parametrize.is_parametrized(module, "weight"):
        prefix = join(path, "parametrizations", "weight")
        inside: Any = module.parametrizations
        own = dict(inside["weight"].named_parameters(prefix=prefix))
        weight = max(own.values(), key=Tensor.numel, default=None)
    else:
        own = {join(path, n): it for n, it in module._parameters.items() if n.startswith("weight_")}
        weight = next(
            (it for n in _COMPUTED_FROM if (it := own.get(join(path, n))) is not None), None
        )
    if weight is None:
        return None
    found = matrix_stored_as(weight, next(iter(own)), path)
    return None if found is None else replace(found, computed=path, stored=tuple(own))


def _with_updates(found: StoredMatrix, layer: nn.Module, path: str) -> StoredMatrix:
    """Return a layer of peft: its base and the updates that are active."""
    found = replace(found, path=reader_path(path), holder=path)
    if bool(getattr(layer, "fan_in_fan_out", False)) and not found.transposed:
        found = replace(found, transposed=True, out=found.inputs, inputs=found.out)
    if bool(getattr(layer, "disable_adapters", False)):
        return found
    merged = set(getattr(layer, "merged_adapters", ()) or ())
    updates = (_low_rank(layer, it, path) for it in _active(layer) if it not in merged)
    return replace(found, updates=tuple(it for it in updates if it is not None))


def _low_rank(layer: nn.Module, adapter: str, path: str) -> LowRank | None:
    inside = {name for name, it in layer._modules.items() if _holds(it, adapter)}
    for down, end in (("lora_A", ".weight"), ("lora_embedding_A", "")):
        up = down.replace("A", "B")
        if not {down, up} <= inside:
            continue
        if "lora_magnitude_vector" in inside:
            raise NotMeasuredError(
                f"its adapter {adapter!r} is DoRA, whose effective weight is not computed"
            )
        scaling: Any = getattr(layer, "scaling", {})
        names = [f"{join(path, part)}.{adapter}{end}" for part in (down, up)]
        return LowRank(names[0], names[1], float(scaling[adapter]), transposed=not end)
    if inside:
        raise NotMeasuredError(f"its adapter {adapter!r} is not LoRA")
    return None


def _holds(inside: nn.Module | None, key: str) -> bool:
    return isinstance(inside, nn.ModuleDict | nn.ParameterDict) and key in inside


def _active(layer: nn.Module) -> tuple[str, ...]:
    named = getattr(layer, "active_adapters", None) or getattr(layer, "active_adapter", ())
    return (named,) if isinstance(named, str) else tuple(named or ())


def _trained_copy(module: nn.Module, saved: nn.ModuleDict, path: str) -> StoredMatrix | None:
    """Return a module of which peft trains a copy: the copy where it is used, else the original."""
    name = used_copy(module, saved)
    inside = saved[name] if name else module._modules.get("original_module")
    if inside is None:
        return None
    found = matrix_of(inside, join(path, f"modules_to_save.{name}" if name else "original_module"))
    return None if found is None else replace(found, path=reader_path(path))


def used_copy(module: nn.Module, saved: Mapping[str, nn.Module] | nn.ModuleDict) -> str:
    """Return the name of the copy that peft uses in the place of a module; "" for none."""
    if bool(getattr(module, "disable_adapters", False)):
        return ""
    return next((name for name in _active(module) if name in saved), "")
