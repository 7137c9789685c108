"""Which parameters are projected, and with which settings."""

import gc
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from joma.errors import JomaError
from joma.optim.galore._slot import is_projected

Parameters = nn.Module | Iterable[Any]
"""A model, parameters, pairs of names and parameters, or parameter groups as torch has them."""

_MATRIX_MODULES = ("Linear", "Conv1D", "NonDynamicallyQuantizableLinear")
"""Names of the modules whose `weight` multiplies activations; Conv1D is that of GPT-2."""
_HEADS = re.compile(r"lm_head|embed_out|unembed|classifier|score|head")
_EMBEDDINGS = re.compile(
    r"(\w+_)?(embed|embedding|embeddings|embedder|emb|wte|wpe)(_(in|tokens|positions))?"
)
"""Names of modules that are output layers or embeddings, where only names are known."""


class _Candidate(NamedTuple):
    """A parameter, and whether it is the matrix of a layer.

    Embeddings, output layers, tied weights, biases and the gains of norms are not.
    """

    name: str
    parameter: Tensor
    is_matrix: bool

    @property
    def entry(self) -> Any:
        """What torch takes in a parameter group."""
        return (self.name, self.parameter) if self.name else self.parameter


def _candidates(parameters: nn.Module | Sequence[Any]) -> list[_Candidate]:
    """Return the parameters of a model that want a gradient, or all that are given.

    Of those that are given without a model, embeddings, the output layer and tied weights are found
    in the model that they belong to, as are the names of those without; all other matrices may be
    projected. Where no model in memory has all of them, names alone decide.
    """
    if isinstance(parameters, nn.Module):
        matrices, outside = _roles(parameters)
        named = [one for one in parameters.named_parameters() if one[1].requires_grad]
        possible = {id(one) for _, one in named} & matrices
    else:
        named = [one if isinstance(one, tuple) else ("", one) for one in parameters]
        for _, one in named:
            if not isinstance(one, Tensor):
                raise JomaError(f"parameters must be tensors, got {type(one).__name__}")
        model = _model_of([one for _, one in named])
        outside = set[int]() if model is None else _roles(model)[1]
        if model is not None:
            names = {id(one): name for name, one in model.named_parameters()}
            named = [(name or names[id(one)], one) for name, one in named]
        possible = {
            id(one)
            for name, one in named
            if one.ndim == 2 and not _EMBEDDINGS.fullmatch(_module_name(name))
        }
    return [
        _Candidate(
            name,
            one,
            id(one) in possible - outside and not _HEADS.fullmatch(_module_name(name)),
        )
        for name, one in named
    ]


def _module_name(name: str) -> str:
    """Return the own name of the module of a parameter: "head" of "model.head.weight"."""
    return name.removesuffix(".weight").rpartition(".")[2]


def _roles(model: nn.Module) -> tuple[set[int], set[int]]:
    """Return which parameters are matrices of layers, and which are not to be projected, by id.

    The latter are embeddings, output layers and what several modules share. A last linear layer
    with an output for each row of an embedding is an output layer.
    """
    matrices, outside = set[int](), set[int]()
    owners: dict[int, int] = {}
    modules = list(model.modules())
    known = [getattr(one, "get_output_embeddings", None) for one in modules]
    heads = {id(find()) for find in known if callable(find)} - {id(None)}
    linear = [one for one in modules if isinstance(one, nn.Linear)]
    words = {one.num_embeddings for one in modules if isinstance(one, nn.Embedding)}
    if linear and linear[-1].out_features in words:
        heads.add(id(linear[-1]))
    for module in modules:
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
        weight = id(getattr(module, "weight", None))
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) or id(module) in heads:
            outside.add(weight)
        elif isinstance(module, nn.Linear) or type(module).__name__ in _MATRIX_MODULES:
            matrices.add(weight)
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
    if isinstance(parameters, nn.parallel.DistributedDataParallel):
        parameters = parameters.module
    given: Any = parameters if isinstance(parameters, nn.Module) else list(parameters)
    as_groups = isinstance(given, list) and all(isinstance(one, Mapping) for one in given)
    if as_groups and given and groups:
        raise JomaError("groups must be empty where parameter groups are passed")
    chosen = [*given] if as_groups and given else [*groups]
    for group in chosen:
        for key in group:
            if key not in {"match", "params", "param_names", *defaults}:
                known = ", ".join(sorted({"match", *defaults}))
                raise JomaError(f"a group has no setting {key!r}; it has {known}")
    if not (as_groups and given):
        made = _by_name(_candidates(given), chosen, defaults)
    elif any("rank" in one for one in chosen):
        made = [{"rank": None, **one} for one in chosen]
    else:
        numbered = [(at, one) for at, group in enumerate(chosen) for one in _entries(group)]
        candidates = _candidates([one for _, one in numbered])
        made = _split([at for at, _ in numbered], candidates, chosen, defaults)
    _check_some(made)
    return made


def _by_name(
    candidates: Sequence[_Candidate],
    groups: Sequence[Mapping[str, Any]],
    defaults: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Return groups of parameters by the first expression that matches."""
    if not candidates:
        raise JomaError("there are no parameters that want a gradient")
    for one in groups:
        if not isinstance(one.get("match"), str):
            raise JomaError(f"a group must have a regular expression as 'match', got {dict(one)}")
    found = []
    for candidate in candidates:
        matching = (at for at, one in enumerate(groups) if re.search(one["match"], candidate.name))
        found.append(next(matching, len(groups)))
    if unused := set(range(len(groups))) - set(found):
        raise JomaError(f"no parameter's name matches {groups[min(unused)]['match']!r}")
    return _split(found, candidates, [*groups, {}], defaults)


def _split(
    numbers: Sequence[int],
    candidates: Sequence[_Candidate],
    groups: Sequence[Mapping[str, Any]],
    defaults: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Return each group, whose number stands with its candidates, as what is projected or not."""
    members: dict[tuple[int, bool], list[Any]] = {}
    for at, candidate in zip(numbers, candidates, strict=True):
        wanted = candidate.is_matrix or groups[at].get("rank") is not None
        members.setdefault((at, wanted and candidate.parameter.ndim == 2), []).append(
            candidate.entry
        )
    made = []
    for (at, projected), entries in members.items():
        settings = {key: one for key, one in groups[at].items() if key in defaults}
        rank = settings.get("rank", defaults["rank"]) if projected else None
        made.append({**settings, "rank": rank, "params": entries})
    return made


def _entries(group: Mapping[str, Any]) -> list[Any]:
    """Return the parameters of a group, with their names where they are known."""
    entries = group["params"]
    entries = [entries] if isinstance(entries, Tensor) else list(entries)
    if "param_names" in group:
        return list(zip(group["param_names"], entries, strict=True))
    return entries


def _check_some(groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise JomaError unless some matrix is projected."""
    ranks = [
        (one[1] if isinstance(one, tuple) else one, group["rank"])
        for group in groups
        for one in _entries({"params": group["params"]})
    ]
    if any(is_projected(*one) for one in ranks):
        return
    wanted = [min(one.shape) for one, rank in ranks if rank is not None and one.ndim == 2]
    if wanted:
        raise JomaError(
            f"GaLore projects nothing: the rank must be below the shorter side of a matrix, which "
            f"is at most {max(wanted)} here"
        )
    raise JomaError(
        "GaLore projects nothing: no rank was given, or no matrix of a linear layer was found; "
        'name matrices by a regular expression, as in groups=[{"match": "mlp", "rank": 128}]'
    )
