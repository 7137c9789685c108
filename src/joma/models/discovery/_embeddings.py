"""Finding the token embeddings of a model."""

import re
from collections.abc import Mapping

from torch import nn

from joma.models.discovery._projections import Projection, projection_of
from joma.models.parts import Weight

_NOT_TOKENS = re.compile(r"pos|type|segment|relative|per_layer|bias|lang|speaker", re.IGNORECASE)


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
    chosen: dict[str, Projection] = {}
    for module in modules.values():
        named = _named_by(module)
        path = None if named is None else paths.get(id(named))
        if named is not None and path is not None and not _NOT_TOKENS.search(_last(path)):
            _add(chosen, named, path)
    if not chosen:
        sizes = {
            path: module.num_embeddings
            for path, module in modules.items()
            if isinstance(module, nn.Embedding) and not _NOT_TOKENS.search(_last(path))
        }
        if sizes:
            largest = max(sizes, key=lambda path: sizes[path])
            _add(chosen, modules[largest], largest)
    found, seen = [], set()
    for projection in chosen.values():
        if projection.why_not:
            missing[projection.path or projection.name] = projection.why_not
            continue
        parameter = id(_parameter(model, projection.name))
        if parameter in seen:
            continue  # tied: two towers share the table
        seen.add(parameter)
        found.append(projection.weight("embedding", None))
    return tuple(found)


def _named_by(module: nn.Module) -> nn.Module | None:
    """Return what a Hugging Face model says its input embedding is."""
    get = getattr(type(module), "get_input_embeddings", None)
    if get is None:
        return None
    try:
        named = get(module)
    except Exception:  # a model without one says so in different ways
        return None
    return named if isinstance(named, nn.Module) and _is_table(named) else None


def _is_table(module: nn.Module) -> bool:
    inside = module._modules.get("base_layer", module._modules.get("original_module", module))
    return isinstance(inside, nn.Embedding)


def _add(chosen: dict[str, Projection], module: nn.Module, path: str) -> None:
    projection = projection_of(module, path)
    if projection is not None:
        chosen.setdefault(projection.name, projection)


def _parameter(model: nn.Module, name: str) -> object:
    try:
        return model.get_parameter(name)
    except AttributeError:
        return name


def _last(path: str) -> str:
    return path.rpartition(".")[2]
