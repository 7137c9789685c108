"""Find the weights, attentions, MLPs and blocks of a transformer that no map is known of.

Names say what a matrix is, and shapes confirm it; what they do not say, a map does
(`joma.models.architectures`). `find_weights` reads a model, `find_stored_weights` the names and
shapes in files. What cannot be understood is left out and named in `Found.missing`.
"""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from joma.errors import JomaError
from joma.models.architectures import (
    ROLES,
    Architecture,
    config_entry,
    found_by_map,
    registered_for,
)
from joma.models.discovery._matrices import (
    NotMeasuredError,
    StoredMatrix,
    check_readable,
    join,
    matrix_of,
    reader_path,
    used_copy,
)
from joma.models.discovery._roles import (
    FoundAttention,
    FoundMlp,
    Lookup,
    attention_at,
    mlp_at,
)
from joma.models.model_weights import AttentionPart, BlockPart, Found, Mlp, Place, Rows, Weight
from joma.models.weight_files import StoredTensor, WeightFiles

__all__ = ["find_stored_weights", "find_weights", "reader_path"]

_PARTS_OF_CONFIGS = ("text_config", "language_config", "llm_config", "decoder", "vision_config")
_NOT_TOKENS = re.compile(r"pos|type|segment|relative|per_layer|bias|lang|speaker", re.IGNORECASE)
_DEEPEST = 24
"""Parts of a name beyond which it is no module's."""


def find_weights(model: nn.Module, *, architecture: Architecture | None = None) -> Found:
    """Return the weights, attentions, MLPs and blocks of a model, and what is missing.

    Works on Hugging Face models (with or without a head, wrapped by peft, checkpointed), on
    torch's own transformer layers, and on other modules that name their projections in a usual
    way. Parameters on the meta device are found as well.

    Args:
        model: any module.
        architecture: a map to go by instead. One that was registered for this kind of model
            (`joma.models.register`) is used as if it was given.

    Raises:
        ValueError: the model does not have what the map that was given names.
    """
    if architecture is None:
        architecture = registered_for(model)
    if architecture is None:
        return _found(model)
    return found_by_map(dict(model.named_parameters(remove_duplicate=False)), architecture, model)


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
        return found_by_map(files.tensors, architecture, config)
    return _found(_tree_of(files.tensors, config))


def _found(model: nn.Module) -> Found:
    """Return what names and shapes say of one module tree."""
    modules, missing = _in_use(model), dict[str, str]()
    matrices: dict[str, StoredMatrix] = {}
    stacks: dict[str, tuple[str, Tensor]] = {}
    for path, module in modules.items():
        _read(path, module, matrices, stacks, missing)

    def inside(path: str) -> Lookup:
        prefix = reader_path(path).lower()
        return lambda name: matrices.get(join(prefix, name))

    attentions, mlps = list[FoundAttention](), list[FoundMlp]()
    configs: dict[str, Any] = {}
    taken: set[str] = set()
    for path, module in modules.items():
        above = path.rpartition(".")[0]
        own = vars(module).get("config")
        configs[path] = configs.get(above) if own is None else _of_text(own)
        lookups = inside(path), inside(above) if path else lambda name: None
        attention = attention_at(module, reader_path(path), *lookups, configs[path])
        if attention is not None and not _names_of(attention) & taken:
            attentions.append(attention)
            taken |= _names_of(attention)
            missing |= attention.notes
    for path, module in modules.items():
        mlp = mlp_at(module, reader_path(path), inside(path), stacks, taken, configs[path])
        if mlp is not None and not _names_of(mlp) & taken:
            mlps.append(mlp)
            taken |= _names_of(mlp)
    blocks = _Blocks(modules, attentions, mlps)
    made = [_attention(it, blocks.layer_of(it.path)) for it in attentions]
    found = Found(
        _embeddings(modules, matrices),
        tuple(it for it in made if it.weights),
        tuple(one for it in mlps for one in _experts(it, blocks.layer_of(it.path))),
        blocks.blocks,
        missing,
    )
    present = {weight.role for weight in found.weights}
    for role in ROLES:
        if role not in present and not (role == "mlp_up" and "mlp_lower" in present):
            missing[role] = f"no part of {type(model).__name__} was recognised as its {role}"
    return found


def _read(
    path: str,
    module: nn.Module,
    matrices: dict[str, StoredMatrix],
    stacks: dict[str, tuple[str, Tensor]],
    missing: dict[str, str],
) -> None:
    """Note the matrices a module holds, by path in lower case, and why one is not measured."""
    shown = reader_path(path)
    try:
        matrix = matrix_of(module, path)
        if matrix is not None:
            matrices.setdefault(shown.lower(), matrix)
    except NotMeasuredError as error:
        missing[shown] = str(error)
    base = module._modules.get("base_layer")
    if base is not None and any(not is_lazy(it) and it.ndim == 3 for it in base.parameters()):
        missing[shown] = "an adapter changes it, and how is not known for stacks of matrices"
    for name, parameter in module._parameters.items():
        if parameter is not None and not is_lazy(parameter) and parameter.ndim == 3:
            key = shown if name == "weight" else join(shown, name)
            try:
                check_readable(parameter)
                stacks[key.lower()] = join(path, name), parameter
            except NotMeasuredError as error:
                missing[key] = str(error)


def _names_of(found: FoundAttention | FoundMlp) -> set[str]:
    return {matrix.name for matrix, _ in found.parts.values()}


def _of_text(config: Any) -> Any:
    """Return the part of a configuration that describes blocks; the whole without such a part."""
    if config_entry(config, "hidden_size") is not None:
        return config
    inside = (config_entry(config, name) for name in _PARTS_OF_CONFIGS)
    return next((it for it in inside if it is not None and not isinstance(it, str)), config)


def _attention(found: FoundAttention, layer: int | None) -> AttentionPart:
    made: dict[str, Any] = {role: _weight(role, layer, *part) for role, part in found.parts.items()}
    heads = {"heads": found.heads, "key_heads": found.key_heads, "latent": found.latent}
    return AttentionPart(found.path, layer, **made, **heads)


def _experts(found: FoundMlp, layer: int | None) -> list[Mlp]:
    def one(path: str, expert: int | None, stacked: bool) -> Mlp:
        made: dict[str, Any] = {
            role.removeprefix("mlp_"): _weight(role, layer, *part, expert, stacked)
            for role, part in found.parts.items()
        }
        return Mlp(path, layer, **made, expert=expert, down_path=found.down_path)

    if found.experts is None:
        return [one(found.path, _expert_number(found.path), False)]
    return [one(f"{found.path}[{expert}]", expert, True) for expert in range(found.experts)]


def _weight(
    role: str,
    layer: int | None,
    matrix: StoredMatrix,
    rows: Rows | None,
    expert: int | None = None,
    stacked: bool = False,
) -> Weight:
    """Return the weight that is a matrix, some rows of it, or one of a stack of matrices."""
    module = (matrix.path or matrix.name) + (f"[{expert}]" if stacked else "")
    return Weight(
        role,
        layer,
        module if rows is None else f"{module}[{role}]",
        matrix.name,
        Place(matrix.name, rows, matrix.transposed),
        expert=expert,
        updates=matrix.updates,
        path=matrix.computed,
        stored=matrix.stored,
    )


class _Blocks:
    """Which block each part of a model is in, and the blocks' numbers."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        attentions: Iterable[FoundAttention],
        mlps: Iterable[FoundMlp],
    ) -> None:
        attending = {path for it in attentions for path in _above(it.path)}
        both = attending & {path for it in mlps for path in _above(it.path)}
        self._block_of: dict[str, str] = {}
        for it in (*attentions, *mlps):
            numbered = [path for path in _above(it.path) if _is_numbered(path)]
            whole = [path for path in numbered if path in both]
            common = [path for path in _above(it.path) if path in both]
            self._block_of[it.path] = (whole or numbered or common or [it.path])[0]
        found = dict.fromkeys(self._block_of.values())
        lists = {path.rpartition(".")[0] for path in found if _is_numbered(path)}
        # A model may have blocks without numbers in their paths: their order numbers them.
        self._order = {}
        if all(_number(path) is None for path in found):
            self._order = {path: place for place, path in enumerate(found)}
        shown = {reader_path(path): module for path, module in modules.items()}
        self.blocks = tuple(
            BlockPart(path, self._number(path))
            for path, module in shown.items()
            if (path in found or (path.rpartition(".")[0] in lists and _is_numbered(path)))
            and not isinstance(module, nn.Identity)
        )

    def layer_of(self, path: str) -> int | None:
        """Return the number of the block a part is in."""
        return self._number(self._block_of.get(path, path))

    def _number(self, path: str) -> int | None:
        return self._order.get(path, _number(path))


def _above(path: str) -> list[str]:
    """Return a path and those above it, the closest first."""
    found = [path]
    while path:
        path = path.rpartition(".")[0]
        found.append(path)
    return found


def _is_numbered(path: str) -> bool:
    return path.rpartition(".")[2].isdigit() and _expert_number(path) is None


def _number(path: str) -> int | None:
    numbers = [int(part) for part in path.split(".") if part.isdigit()]
    return numbers[-1] if numbers else None


def _expert_number(path: str) -> int | None:
    above, _, last = path.rpartition(".")
    inside = "expert" in above.rpartition(".")[2].lower()
    return int(last) if inside and last.isdigit() else None


def _in_use(model: nn.Module) -> dict[str, nn.Module]:
    """Return modules by path, without what peft keeps next to the copies it trains."""
    unused: set[str] = set()
    for path, module in model.named_modules():
        copies = module._modules.get("modules_to_save")
        if isinstance(copies, nn.ModuleDict):
            used = used_copy(module, copies)
            unused |= {f"{path}.modules_to_save.{name}" for name in copies if name != used}
            unused |= {f"{path}.original_module"} if used else set()
    return {
        path: module
        for path, module in model.named_modules()
        if not {"base_layer", "lora_A", "lora_B"} & set(path.split("."))
        and not unused & set(_above(path))
    }


def _embeddings(
    modules: Mapping[str, nn.Module], matrices: Mapping[str, StoredMatrix]
) -> tuple[Weight, ...]:
    """Return the token embeddings, each once.

    Those that Hugging Face models name; else the embedding with most rows that is not one of
    positions, types or relative distances.
    """
    paths = {id(module): path for path, module in reversed(list(modules.items()))}
    named = [paths.get(id(it)) for module in modules.values() if (it := _named_by(module))]
    tables = {
        path: module.num_embeddings
        for path, module in modules.items()
        if isinstance(module, nn.Embedding)
    }
    every = [path for path in (*named, *tables) if path is not None and not _is_other(path)]
    chosen = [path for path in every if path in named] or sorted(every, key=lambda it: -tables[it])[
        :1
    ]
    found: dict[int, Weight] = {}
    for path in chosen:
        matrix = matrices.get(reader_path(path).lower())
        if matrix is not None:  # two towers may share one
            found.setdefault(id(_table(modules[path])), _weight("embedding", None, matrix, None))
    return tuple(found.values())


def _is_other(path: str) -> bool:
    return _NOT_TOKENS.search(path.rpartition(".")[2]) is not None


def _named_by(module: nn.Module) -> nn.Module | None:
    """Return what a Hugging Face model says its input embedding is."""
    get = getattr(type(module), "get_input_embeddings", None)
    if get is None:
        return None
    try:
        named = get(module)
    except Exception:  # a model without one says so in different ways
        return None
    return (
        named if isinstance(named, nn.Module) and isinstance(_inner(named), nn.Embedding) else None
    )


def _inner(module: nn.Module) -> nn.Module | None:
    """Return the layer inside of a layer of peft."""
    return module._modules.get("base_layer", module._modules.get("original_module", module))


def _table(module: nn.Module) -> object:
    inner = _inner(module)
    return module if inner is None else inner._parameters.get("weight", module)


class Conv1D(nn.Module):
    """Stands for GPT-2's transposed linear layer."""


_TABLE = re.compile(r"embed(?!.*out)|wte|tok|word|shared|^w$", re.IGNORECASE)


def _tree_of(tensors: Mapping[str, StoredTensor], config: Any) -> nn.Module:
    """Return a tree of modules with parameters of these names and shapes, without numbers.

    Args:
        tensors: by name.
        config: the configuration, which the tree's root carries.
    """
    root = nn.Module()
    root.config = config
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        odd = any(not part or hasattr(nn.Module, part) for part in (*path, last))
        if odd or len(path) > _DEEPEST or not tensor.dtype.is_floating_point:
            continue
        module = root
        for part in path:
            module = module._modules.setdefault(part, nn.Module()) or root
        if last not in module._modules and math.prod(tensor.shape):
            made = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            module._parameters[last] = nn.Parameter(made, requires_grad=False)
    for path, module in list(root.named_modules()):
        _mark_transposed(module)
        _mark_table(path, module)
    return root


def _mark_transposed(module: nn.Module) -> None:
    """Mark matrices stored as (in, out), as GPT-2's are: wide where another model's are tall."""
    for first in ("c_attn", "c_fc"):
        weight = getattr(module._modules.get(first), "weight", None)
        if isinstance(weight, Tensor) and weight.ndim == 2 and weight.shape[0] < weight.shape[1]:
            for name in (first, "c_proj"):
                if (inside := module._modules.get(name)) is not None:
                    inside.__class__ = Conv1D


def _mark_table(path: str, module: nn.Module) -> None:
    """Take a module with one matrix for an embedding where it is called so."""
    weight = module._parameters.get("weight")
    if weight is None or weight.ndim != 2 or module._modules or type(module) is not nn.Module:
        return
    if len(module._parameters) == 1 and _TABLE.search(path.rpartition(".")[2]):
        module.__class__ = nn.Embedding
        module.num_embeddings, module.embedding_dim = weight.shape  # type: ignore[assignment]
