"""Finding weights by the names and shapes of a file's tensors, where no model is built.

The names are put back into a tree of modules without numbers, which discovery reads as it does
a model. The model of the configuration, built without numbers as well, tells what names and
shapes do not: which class an attention is of.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from joma.common.quiet import quietly
from joma.errors import JomaError
from joma.models._size_checks import bounded, check_config
from joma.models.architectures import Architecture, found_by_map, registered_for
from joma.models.discovery._finder import Finder
from joma.models.parts import Found
from joma.models.weight_files import StoredTensor, WeightFiles

_DEEPEST = 24
"""Parts of a name beyond which it is no module's."""
_MODULES, _MODULES_PER_TENSOR = 10_000, 20


def find_stored_weights(files: WeightFiles, *, architecture: Architecture | None = None) -> Found:
    """Return the weights in files, by the configuration next to them and the names they have.

    Args:
        files: the weights of a model.
        architecture: a map to go by instead.

    Raises:
        ValueError: there is neither a configuration nor a map, or the files do not hold what the
            map names.
    """
    config = files.config()
    if architecture is None:
        if config is None:
            raise JomaError(
                f"{files.source} has no config.json, which says what its weights are: give a map "
                "(architecture, or --map on the command line)"
            )
        architecture = registered_for(config)
    if architecture is not None:
        return found_by_map(files.names, architecture, config)
    return _by_model(files, config) or Finder(tree_of(files.tensors, config)).found()


def _by_model(files: WeightFiles, config: Any) -> Found | None:
    """Return what is found in the model of the configuration, if the files have its names."""
    model = model_without_numbers(config, len(files.tensors))
    if model is None:
        return None
    own = {name: tuple(it.shape) for name, it in model.named_parameters(remove_duplicate=False)}
    stored = {name: tensor.shape for name, tensor in files.tensors.items()}
    found = Finder(model).found()
    if not found.weights:
        return None
    if any(stored.get(name) != own[name] for it in found.weights for name in it.names):
        return None
    return found


def model_without_numbers(config: Mapping[str, Any], tensors: int) -> nn.Module | None:
    """Return the model of a configuration on the meta device; None where it cannot be made.

    Args:
        config: the contents of a config.json.
        tensors: how many tensors the files hold: a model of far more modules is not made.
    """
    try:
        from transformers import AutoConfig

        from joma.models.loading import class_of

        check_config(config, "config.json")
        with quietly(), torch.device("meta"), bounded(_MODULES + _MODULES_PER_TENSOR * tensors):
            made = AutoConfig.for_model(**config)
            model_class = class_of(made)
            made._attn_implementation = None  # not a configuration's to say
            return model_class(made)
    except Exception:  # whatever a model's class says to values it cannot be made of
        return None


def tree_of(tensors: Mapping[str, StoredTensor], config: Any) -> nn.Module:
    """Return a tree of modules with parameters of these names and shapes, without numbers.

    Args:
        tensors: by name.
        config: the configuration, which the tree's root carries.
    """
    root = nn.Module()
    root.config = config  # type: ignore[assignment]
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        if not all(path) or not last or len(path) > _DEEPEST:
            continue
        module: nn.Module | None = root
        for part in path:
            module = _inside(module, part)
            if module is None:
                break
        if module is None or last in module._modules or hasattr(nn.Module, last):
            continue
        if tensor.dtype.is_floating_point and math.prod(tensor.shape):
            made = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            module._parameters[last] = nn.Parameter(made, requires_grad=False)
    _mark_transposed(root)
    _mark_tables(root)
    return root


def _inside(module: nn.Module, part: str) -> nn.Module | None:
    if part in module._parameters or hasattr(nn.Module, part):
        return None
    inside = module._modules.get(part)
    if inside is None:
        inside = module._modules[part] = nn.Module()
    return inside


class Conv1D(nn.Module):
    """Stands for GPT-2's transposed linear layer."""


def _mark_transposed(root: nn.Module) -> None:
    """Mark matrices stored as (in, out), as GPT-2's are: wide where another model's are tall."""
    for module in list(root.modules()):
        for first, names in (("c_attn", ("c_attn", "c_proj")), ("c_fc", ("c_fc", "c_proj"))):
            inside = module._modules.get(first)
            weight = None if inside is None else inside._parameters.get("weight")
            if weight is None or weight.ndim != 2 or weight.shape[0] >= weight.shape[1]:
                continue
            for name in names:
                inside = module._modules.get(name)
                if inside is not None:
                    inside.__class__ = Conv1D


_TABLE = re.compile(r"embed(?!.*out)|wte|tok|word|shared|^w$", re.IGNORECASE)


def _mark_tables(root: nn.Module) -> None:
    """Take modules with a matrix for embeddings where they are called so."""
    for path, module in list(root.named_modules()):
        weight = module._parameters.get("weight")
        if weight is None or weight.ndim != 2 or module._modules or type(module) is not nn.Module:
            continue
        if len(module._parameters) == 1 and _TABLE.search(path.rpartition(".")[2]):
            module.__class__ = nn.Embedding
            module.num_embeddings, module.embedding_dim = weight.shape  # type: ignore[assignment]
