"""Which parameters are projected, and with which settings."""

import gc
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from joma.errors import JomaError

Parameters = nn.Module | Iterable[Any]
"""A model, parameters, pairs of names and parameters, or parameter groups as torch has them."""

_MATRIX_MODULES = ("Linear", "Conv1D", "NonDynamicallyQuantizableLinear")
"""Names of the modules whose `weight` multiplies activations; Conv1D is that of GPT-2."""
_HEADS = re.compile(r"lm_head|embed_out|unembed|classifier|score|head")
_EMBEDDINGS = re.compile(
    r"(\w+_)?(embed|embedding|embeddings|embedder|emb|wte|wpe)(_(in|tokens|positions))?"
)
"""Names of modules that are output layers or embeddings, where only names are known."""


@dataclass(frozen=True)
class Candidate:
    """A parameter and whether it is projected unless a group of the user says otherwise.

    Attributes:
        name: Its name, or "" where none is known.
        parameter: The parameter.
        is_matrix: Whether it is the matrix of a layer: not an embedding, an output layer, a tied
            weight, a bias or the gain of a norm.
    """

    name: str
    parameter: Tensor
    is_matrix: bool


def of_model(model: nn.Module) -> list[Candidate]:
    """Return the parameters of a model that want a gradient."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    matrices, outside = _roles(model)
    return [
        Candidate(
            name,
            parameter,
            id(parameter) in matrices - outside and not _HEADS.fullmatch(_module_name(name)),
        )
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]


def of_parameters(parameters: Sequence[Any]) -> list[Candidate]:
    """Return parameters, or pairs of names and parameters, as candidates.

    Embeddings, the output layer and tied weights are found in the model that the parameters belong
    to, as are the names of those without; all other matrices may be projected. Where no model in
    memory has all of them, names alone decide.

    Raises:
        JomaError: One is no tensor.
    """
    found = [one if isinstance(one, tuple) else ("", one) for one in parameters]
    for _, parameter in found:
        if not isinstance(parameter, Tensor):
            raise JomaError(f"parameters must be tensors, got {type(parameter).__name__}")
    outside: set[int] = set()
    model = _model_of([parameter for _, parameter in found])
    if model is not None:
        outside = _roles(model)[1]
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        found = [(name or names[id(parameter)], parameter) for name, parameter in found]
    return [
        Candidate(
            name,
            parameter,
            parameter.ndim == 2
            and id(parameter) not in outside
            and not _HEADS.fullmatch(_module_name(name))
            and not _EMBEDDINGS.fullmatch(_module_name(name)),
        )
        for name, parameter in found
    ]


def _module_name(name: str) -> str:
    """Return the own name of the module of a parameter: "head" of "model.head.weight"."""
    return name.removesuffix(".weight").rpartition(".")[2]


def _roles(model: nn.Module) -> tuple[set[int], set[int]]:
    """Return which parameters are matrices of layers, and which are not to be projected, by id.

    The latter are embeddings, output layers and what several modules share. A last linear layer
    with an output for each row of an embedding is an output layer.
    """
    matrices: set[int] = set()
    outside: set[int] = set()
    owners: dict[int, int] = {}
    heads = {id(_output_layer(module)) for module in model.modules()} - {id(None)}
    linear = [one for one in model.modules() if isinstance(one, nn.Linear)]
    words = {one.num_embeddings for one in model.modules() if isinstance(one, nn.Embedding)}
    if linear and linear[-1].out_features in words:
        heads.add(id(linear[-1]))
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
        weight = getattr(module, "weight", None)
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) or id(module) in heads:
            outside.add(id(weight))
        elif isinstance(module, nn.Linear) or type(module).__name__ in _MATRIX_MODULES:
            matrices.add(id(weight))
        elif isinstance(module, nn.MultiheadAttention):
            for part in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
                matrices.add(id(getattr(module, part)))
    return matrices, outside | {one for one, count in owners.items() if count > 1}


def _model_of(parameters: Sequence[Tensor]) -> nn.Module | None:
    """Return the smallest model in memory that has all of these parameters, if there is one.

    Trainers pass parameters without names; torch has no way from a parameter to its module but
    through the objects that Python's garbage collector knows.
    """
    wanted = {id(parameter) for parameter in parameters}
    found: list[tuple[int, int, nn.Module]] = []
    for one in gc.get_objects():
        if not issubclass(type(one), nn.Module) or "_modules" not in vars(one):
            continue
        try:
            own = {id(parameter) for parameter in one.parameters()}
            if wanted <= own:
                found.append((len(own), -len(list(one.modules())), one))
        except Exception:  # a module of somebody else that is not built to the end
            continue
    return min(found, key=lambda entry: entry[:2])[2] if found else None


def _output_layer(model: nn.Module) -> nn.Module | None:
    known = getattr(model, "get_output_embeddings", None)
    found = known() if callable(known) else None
    return found if isinstance(found, nn.Module) else None


def parameter_groups(
    parameters: Parameters, groups: Sequence[Mapping[str, Any]], defaults: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return parameter groups as torch has them, each with a rank; None where nothing is projected.

    Args:
        parameters: A model; or parameters, with names or without; or parameter groups. All are
            sorted into groups here, unless a group of the user has the entry "rank": then those
            that have it are projected. Without a model, the one in memory that has the parameters
            decides, and names; where there is neither, every matrix is projected.
        groups: Settings for the parameters whose name matches "match", a regular expression; the
            first group that matches decides. Its "rank" may be None.
        defaults: All settings by name.

    Raises:
        JomaError: A group matches nothing or has an unknown setting; nothing is projected.
    """
    given: list[Any] = [] if isinstance(parameters, nn.Module) else list(parameters)
    if given and all(isinstance(one, Mapping) for one in given):
        if groups:
            raise JomaError("groups must be empty where parameter groups are passed")
        for one in given:
            _check_settings(one, {"params", *defaults, "param_names"})
        if any("rank" in one for one in given):
            made = [{"rank": None, **one} for one in given]
        else:
            made = _split(given, defaults["rank"])
        _check_some(made)
        return made
    candidates = of_model(parameters) if isinstance(parameters, nn.Module) else of_parameters(given)
    if not candidates:
        raise JomaError("there are no parameters that want a gradient")
    patterns = []
    for one in groups:
        _check_settings(one, {"match", *defaults})
        if not isinstance(one.get("match"), str):
            raise JomaError(f"a group must have a regular expression as 'match', got {dict(one)}")
        patterns.append(re.compile(one["match"]))
    members: dict[tuple[int, bool], list[Any]] = {}
    for candidate in candidates:
        found = (at for at, one in enumerate(patterns) if one.search(candidate.name))
        at = next(found, -1)
        projected = candidate.is_matrix or (at >= 0 and groups[at].get("rank") is not None)
        entry = (candidate.name, candidate.parameter) if candidate.name else candidate.parameter
        members.setdefault((at, projected and candidate.parameter.ndim == 2), []).append(entry)
    unused = set(range(len(groups))) - {at for at, _ in members}
    if unused:
        raise JomaError(f"no parameter's name matches {groups[min(unused)]['match']!r}")
    made = []
    for (at, projected), entries in members.items():
        own = {} if at < 0 else {key: one for key, one in groups[at].items() if key != "match"}
        made.append({"rank": defaults["rank"], **own, "params": entries})
        if not projected:
            made[-1]["rank"] = None
    _check_some(made)
    return made


def is_projected(parameter: Tensor, group: Mapping[str, Any]) -> bool:
    """Return whether a parameter is projected: a matrix with sides longer than the rank."""
    rank = group["rank"]
    if rank is None or parameter.ndim != 2:
        return False
    return min(parameter.shape) > (1 if isinstance(rank, float) else rank)


def _split(groups: Sequence[Mapping[str, Any]], rank: Any) -> list[dict[str, Any]]:
    """Return groups of the user, each split into matrices to be projected and the rest."""
    several = [_entries(group) for group in groups]
    candidates = iter(of_parameters([one for entries in several for one in entries]))
    made: list[dict[str, Any]] = []
    for group, entries in zip(groups, several, strict=True):
        own = [next(candidates) for _ in entries]
        settings = {key: one for key, one in group.items() if key != "param_names"}
        for projected in (True, False):
            members = [
                (one.name, one.parameter) if one.name else one.parameter
                for one in own
                if one.is_matrix == projected
            ]
            if members:
                made.append({**settings, "params": members, "rank": rank if projected else None})
    return made


def _entries(group: Mapping[str, Any]) -> list[Any]:
    """Return the parameters of a group, with their names where they are known."""
    entries = group["params"]
    entries = [entries] if isinstance(entries, Tensor) else list(entries)
    if "param_names" in group:
        return list(zip(group["param_names"], entries, strict=True))
    return entries


def _check_settings(group: Mapping[str, Any], known: set[str]) -> None:
    for key in group:
        if key not in known:
            raise JomaError(f"a group has no setting {key!r}; it has {', '.join(sorted(known))}")


def _check_some(groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise JomaError unless some matrix is projected."""
    wanted: list[Tensor] = []
    for group in groups:
        entries = _entries({"params": group["params"]})
        plain = [one[1] if isinstance(one, tuple) else one for one in entries]
        if any(is_projected(one, group) for one in plain):
            return
        if group["rank"] is not None:
            wanted += [one for one in plain if one.ndim == 2]
    if wanted:
        sides = max(min(one.shape) for one in wanted)
        raise JomaError(
            f"GaLore projects nothing: the rank must be below the shorter side of a matrix, which "
            f"is at most {sides} here"
        )
    raise JomaError(
        "GaLore projects nothing: no rank was given, or no matrix of a linear layer was found; "
        'name matrices by a regular expression, as in groups=[{"match": "mlp", "rank": 128}]'
    )
