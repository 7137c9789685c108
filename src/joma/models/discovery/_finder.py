"""The weights of any transformer, found by reading its module tree.

Names and shapes say what a matrix is: which modules hold queries, keys, values and what follows
attention, which an MLP, whether several matrices share one parameter, and in which order. One
forward pass, where one is given, decides what the names leave open. What cannot be understood is
left out and named in `Found.missing`; nothing raises for it.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from joma.models.architectures import ROLES, config_entry
from joma.models.discovery._attentions import FoundAttention, attention_at
from joma.models.discovery._mlps import FoundMlp, mlp_at
from joma.models.discovery._projections import Projection, children, projection_of, reader_path
from joma.models.parts import AttentionPart, BlockPart, Found, Mlp, Place, Rows, Weight

_PARTS_OF_CONFIGS = ("text_config", "language_config", "llm_config", "decoder", "vision_config")

_NOT_TOKENS = re.compile(r"pos|type|segment|relative|per_layer|bias|lang|speaker", re.IGNORECASE)


class Finder:
    """Reads one module tree.

    Args:
        model: The model.

    Attributes:
        attentions: those found, with the ways their fused matrices may be read.
        mlps: those found.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.attentions: list[FoundAttention] = []
        self.mlps: list[FoundMlp] = []
        self._modules = _in_use(model)
        self._shown = {path: reader_path(path) for path in self._modules}
        near = {path: children(module, path) for path, module in self._modules.items()}
        configs: dict[str, Any] = {}
        taken: set[str] = set()
        for path, module in self._modules.items():
            parent = path.rpartition(".")[0]
            own = vars(module).get("config")
            configs[path] = configs.get(parent) if own is None else _of_text(own)
            above = near[parent] if path else {}
            attention = attention_at(module, path, near[path], above, configs[path])
            if attention is not None and not (names := _names_of(attention)) & taken:
                self.attentions.append(attention)
                taken |= names
        for path, module in self._modules.items():
            mlp = mlp_at(module, path, near[path], taken)
            if mlp is not None and not (names := _names_of(mlp)) & taken:
                self.mlps.append(mlp)
                taken |= names
        self._numbers = _Blocks(self._modules, self._shown, self.attentions, self.mlps)

    def found(self) -> Found:
        """Return what was found."""
        missing = _adapted_stacks(self.model)
        attentions = [self._attention(it, missing) for it in self.attentions]
        mlps = [one for it in self.mlps for one in self._experts(it, missing)]
        found = Found(
            embeddings_of(self.model, self._modules, missing),
            tuple(it for it in attentions if it is not None),
            tuple(it for it in mlps if it is not None),
            self._numbers.blocks,
        )
        weights = found.weights
        present = {weight.role for weight in weights}
        for role in ROLES:
            if role not in present and not (role == "mlp_up" and "mlp_lower" in present):
                missing[role] = (
                    f"no part of {type(self.model).__name__} was recognised as its {role}"
                )
        used = {name for weight in weights for name in weight.names}
        inside = tuple(f"{path}." for path in self._numbers.paths if path)
        unrecognised = tuple(
            name
            for name, parameter in self.model.named_parameters()
            if name not in used
            and not name.endswith("bias")
            and name.startswith(inside)
            and not is_lazy(parameter)
            and parameter.ndim > 1
        )
        return replace(found, missing=missing, unrecognised=unrecognised)

    def _attention(self, found: FoundAttention, missing: dict[str, str]) -> AttentionPart | None:
        layer = self._numbers.layer_of(found.path)
        missing |= found.notes
        made: dict[str, Any] = {
            role: _weight(role, layer, *part, missing) for role, part in found.parts.items()
        }
        if not any(made.values()):
            return None
        return AttentionPart(
            self._shown[found.path],
            layer,
            **made,
            heads=found.heads,
            key_heads=found.key_heads,
            latent=found.latent,
            checked=found.checked,
        )

    def _experts(self, found: FoundMlp, missing: dict[str, str]) -> list[Mlp | None]:
        layer = self._numbers.layer_of(found.path)
        path = self._shown[found.path]

        def one(module: str, expert: int | None) -> Mlp | None:
            stacked = found.experts is not None
            made: dict[str, Any] = {
                role.removeprefix("mlp_"): _weight(role, layer, *part, missing, expert, stacked)
                for role, part in found.parts.items()
            }
            if not any(made.values()):
                return None
            return Mlp(module, layer, **made, expert=expert, down_path=found.down_path)

        if found.experts is None:
            return [one(path, _expert_number(found.path))]
        return [one(f"{path}[{expert}]", expert) for expert in range(found.experts)]


def _of_text(config: Any) -> Any:
    """Return the part of a configuration that describes blocks; the whole without such a part."""
    if config_entry(config, "hidden_size") is not None:
        return config
    inside = (config_entry(config, name) for name in _PARTS_OF_CONFIGS)
    return next((it for it in inside if it is not None and not isinstance(it, str)), config)


class _Blocks:
    """Which block each part of a model is in, and the blocks' numbers."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        shown: Mapping[str, str],
        attentions: Iterable[FoundAttention],
        mlps: Iterable[FoundMlp],
    ) -> None:
        self._of: dict[str, str] = {}
        attending = {path for it in attentions for path in _above(it.path)}
        thinking = {path for it in mlps for path in _above(it.path)}
        both = attending & thinking
        for it in (*attentions, *mlps):
            numbered = [path for path in _above(it.path) if _is_numbered(path)]
            whole = [path for path in numbered if path in both]
            if whole:
                self._of[it.path] = whole[0]
        lists = {path.rpartition(".")[0] for path in self._of.values()}
        for it in (*attentions, *mlps):
            if it.path in self._of:
                continue
            numbered = [path for path in _above(it.path) if _is_numbered(path)]
            listed = [path for path in numbered if path.rpartition(".")[0] in lists]
            common = [path for path in _above(it.path) if path in both]
            self._of[it.path] = (listed or numbered or common or [it.path])[0]
        found = dict.fromkeys(self._of.values())
        lists |= {path.rpartition(".")[0] for path in found if _is_numbered(path)}
        if not found:
            lists = _longest_list(modules)
        # A model may have blocks without numbers in their paths: their order numbers them.
        self._order: dict[str, int] = {}
        if all(_number(path) is None for path in found):
            self._order = {path: at for at, path in enumerate(it for it in modules if it in found)}
        self.paths = [
            path
            for path, module in modules.items()
            if (path in found or (path.rpartition(".")[0] in lists and _is_numbered(path)))
            and not isinstance(module, nn.Identity)
        ]
        self.blocks = tuple(BlockPart(shown[path], self._number(path)) for path in self.paths)

    def layer_of(self, path: str) -> int | None:
        """Return the number of the block a part is in."""
        return self._number(self._of.get(path, path))

    def _number(self, path: str) -> int | None:
        return self._order.get(path, _number(path))


def _longest_list(modules: Mapping[str, nn.Module]) -> set[str]:
    """Return the list of most modules of one class, where nothing in a model was recognised."""
    alike = {
        path: len(module)
        for path, module in modules.items()
        if isinstance(module, nn.ModuleList) and len({type(it) for it in module}) == 1
    }
    return {max(alike, key=lambda path: alike[path])} if alike else set()


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


def _weight(
    role: str,
    layer: int | None,
    projection: Projection,
    rows: Rows | None,
    missing: dict[str, str],
    expert: int | None = None,
    stacked: bool = False,
) -> Weight | None:
    """Return the weight that is a matrix, some rows of it, or one of a stack of matrices."""
    if projection.why_not:
        missing[projection.path or projection.name] = projection.why_not
        return None
    module = (projection.path or projection.name) + (f"[{expert}]" if stacked else "")
    return Weight(
        role,
        layer,
        module if rows is None else f"{module}[{role}]",
        projection.name,
        Place(projection.name, rows, projection.transposed),
        expert=expert,
        updates=projection.updates,
        path=projection.computed,
        stored=projection.stored,
    )


def _names_of(found: FoundAttention | FoundMlp) -> set[str]:
    return {projection.name for projection, _ in found.parts.values()}


def _adapted_stacks(model: nn.Module) -> dict[str, str]:
    """Return experts that peft adapts as stacks of matrices, and why they are left out."""
    return {
        reader_path(path): "an adapter changes it, and how is not known for stacks of matrices"
        for path, module in model.named_modules()
        if (base := module._modules.get("base_layer")) is not None
        and any(not is_lazy(it) and it.ndim == 3 for it in base.parameters())
    }


def _in_use(model: nn.Module) -> dict[str, nn.Module]:
    """Return modules by path, without what peft keeps next to the copies it trains."""
    modules = {
        path: module
        for path, module in model.named_modules()
        if not {"base_layer", "lora_A", "lora_B"} & set(path.split("."))
    }
    unused: set[str] = set()
    for path, module in modules.items():
        copies = module._modules.get("modules_to_save")
        if not isinstance(copies, nn.ModuleDict):
            continue
        active = getattr(module, "active_adapters", None) or getattr(module, "active_adapter", ())
        active = (active,) if isinstance(active, str) else tuple(active or ())
        used = [] if getattr(module, "disable_adapters", False) else active
        unused |= {f"{path}.modules_to_save.{name}" for name in copies if name not in used}
        if any(name in copies for name in used):
            unused.add(f"{path}.original_module")
    return {path: it for path, it in modules.items() if not unused & set(_above(path))}


def embeddings_of(
    model: nn.Module, modules: Mapping[str, nn.Module], missing: dict[str, str]
) -> tuple[Weight, ...]:
    """Return the token embeddings, each once.

    Those that Hugging Face models name; else the embedding with most rows that is not one of
    positions, types or relative distances.

    Args:
        model: The whole model.
        modules: Its modules in use, by path.
        missing: Gets an entry for an embedding that cannot be measured.
    """
    paths = {id(module): path for path, module in reversed(list(modules.items()))}
    tables = {
        path: module
        for path, module in modules.items()
        if isinstance(module, nn.Embedding) and not _NOT_TOKENS.search(_last(path))
    }
    named = [_named_by(module) for module in modules.values()]
    places = [(it, paths[id(it)]) for it in named if it is not None and id(it) in paths]
    places = [(it, path) for it, path in places if not _NOT_TOKENS.search(_last(path))]
    chosen = [made for place in places if (made := projection_of(*place)) is not None]
    if not chosen and tables:
        largest = max(tables, key=lambda path: tables[path].num_embeddings)
        made = projection_of(tables[largest], largest)
        chosen = [] if made is None else [made]
    found: dict[object, Weight] = {}
    for projection in chosen:
        weight = _weight("embedding", None, projection, None, missing)
        if weight is not None:
            found.setdefault(_parameter(model, weight.name), weight)  # two towers may share one
    return tuple(found.values())


def _named_by(module: nn.Module) -> nn.Module | None:
    """Return what a Hugging Face model says its input embedding is."""
    get = getattr(type(module), "get_input_embeddings", None)
    if get is None:
        return None
    try:
        named = get(module)
    except Exception:  # a model without one says so in different ways
        return None
    if not isinstance(named, nn.Module):
        return None
    inside = named._modules.get("base_layer", named._modules.get("original_module", named))
    return named if isinstance(inside, nn.Embedding) else None


def _parameter(model: nn.Module, name: str) -> object:
    """Return what tells parameters apart."""
    try:
        return id(model.get_parameter(name))
    except AttributeError:
        return name


def _last(path: str) -> str:
    return path.rpartition(".")[2]
