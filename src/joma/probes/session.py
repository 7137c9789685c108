"""A model measured once on a text, and its weights: every metric that was asked for, in a list.

Attention, the MLPs' activations and the residual stream are measured while the model computes what
it always computes; nothing of it is changed, and no table as large as an attention matrix exists.
Weights are measured one by one, from the model or straight from their files, where no model need be
built.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from joma.common.progress import Progress, no_progress
from joma.errors import JomaError
from joma.models import Found, Weight, WeightFiles, find_stored_weights, find_weights
from joma.models.architectures import ROLES, Architecture, UnknownArchitectureError, how_to_map
from joma.probes.inputs import Inputs, Windows, batches
from joma.probes.metrics import PROBED, Effort, Metric, checked
from joma.probes.reading import Measurement, read
from joma.probes.tap import AttentionMap

__all__ = [
    "DEFAULT_METRICS",
    "METRICS",
    "WEIGHT_METRICS",
    "Measurement",
    "probe",
    "probe_weights",
]

METRICS: Mapping[str, str] = {name: metric.sentence for name, metric in PROBED.items()}
"""Everything that can be asked for, and what it is."""

DEFAULT_METRICS = tuple(name for name, metric in PROBED.items() if metric.by_default)
"""What is measured unless something else is asked for."""

WEIGHT_METRICS = tuple(
    name for name, metric in PROBED.items() if metric.needs in ("weights", "embedding")
)
"""Those of the weights alone, which need no text."""

TOKENS_SAMPLED = 1024
"""Tokens at which MLPs and blocks are measured: little next to forward passes over 10,000."""


def probe(
    model: nn.Module,
    windows: Windows | Inputs | None = None,
    *,
    inputs: Inputs | None = None,
    architecture: Architecture | None = None,
    parts: Found | None = None,
    metrics: Sequence[str] | None = None,
    roles: Sequence[str] = ROLES,
    attention: AttentionMap | None = None,
    batch: int | None = None,
    tolerance: float = 1e-3,
    sample: int = TOKENS_SAMPLED,
    seed: int = 0,
    progress: Progress = no_progress,
) -> list[Measurement]:
    """Measure a model on windows of tokens, or on inputs of any kind.

    Means are over all tokens of all windows; what is measured of MLPs and of the residual stream,
    over a random sample of the tokens. The model runs in evaluation mode without its head, for
    no metric needs logits, and is left as it was.

    Args:
        model: a transformer.
        windows: (number, length), tokens.
        inputs: instead of windows: keyword arguments the model is called with, or a list of such,
            one for each forward pass. For images, sound, sequences with padding, or encoders with
            decoders; the model then runs with its head. Where `input_ids` and an `attention_mask`
            are among them, padded tokens are left out.
        architecture: a map of where its parts are; unless given, they are found by reading the
            module tree and one forward pass. Metrics of attention alone need neither.
        parts: what `joma.models.find_weights` found in the model, where that is known already.
        metrics: which, of `METRICS`; unless given, those of `DEFAULT_METRICS` that the model has
            the parts for.
        roles: whose weights are probed, of `joma.models.ROLES`; experts each on their own.
        attention: for a module of one's own: which of its modules make queries and keys.
        batch: windows read at once; otherwise chosen for the device.
        tolerance: of stable ranks, relative.
        sample: tokens at which MLPs and the residual stream are measured; all where there are not
            more.
        seed: decides the samples and where the search for singular values begins.
        progress: Called with how far it is.
    """
    asked = checked(DEFAULT_METRICS if metrics is None else metrics)
    chosen = tuple(metric.name for metric in asked)
    device = next(model.parameters()).device
    text = batches(windows, inputs, sample, seed, device, batch)
    if any(metric.needs != "attention" for metric in asked):
        if parts is None:
            parts = find_weights(model, architecture=architecture)
        chosen = measurable(chosen, parts, model, roles, asked_for=metrics is not None)
    of_weights = [name for name in chosen if name in WEIGHT_METRICS]
    of_text = [PROBED[name] for name in chosen if name not in WEIGHT_METRICS]
    found: list[Measurement] = []
    if of_text:
        found += read(
            model, parts, of_text, text, attention, sample=sample, seed=seed, progress=progress
        )
    if of_weights:
        assert parts is not None
        found += _of_weights(model, parts, of_weights, roles, Effort(tolerance, seed), progress)
    return sorted(found, key=lambda one: chosen.index(one.metric))


def probe_weights(
    source: nn.Module | WeightFiles,
    *,
    architecture: Architecture | None = None,
    parts: Found | None = None,
    metrics: Sequence[str] | None = None,
    roles: Sequence[str] = ROLES,
    tolerance: float = 1e-3,
    seed: int = 0,
    progress: Progress = no_progress,
) -> list[Measurement]:
    """Measures weights one by one, of a model or as they lie in files.

    From files one tensor at a time is read, measured and forgotten, so that a model far larger
    than the memory can be measured. Of a model wrapped by peft the effective weights W + scaling·BA
    are measured.

    Args:
        source: the model, or its files.
        architecture: a map of where its parts are; unless given, they are found by reading the
            module tree, or the names in the files.
        parts: what `joma.models.find_weights` or `find_stored_weights` found, where that is known
            already.
        metrics: which, of `WEIGHT_METRICS`; stable ranks unless given.
        roles: whose weights, of `joma.models.ROLES`; experts each on their own. Those the model
            does not have are left out.
        tolerance: of stable ranks, relative.
        seed: decides samples and where the search for singular values begins.
        progress: Called with how far it is.
    """
    asked = checked(("stable_rank",) if metrics is None else metrics, WEIGHT_METRICS)
    chosen = tuple(metric.name for metric in asked)
    if parts is not None:
        pass
    elif isinstance(source, WeightFiles):
        parts = find_stored_weights(source, architecture=architecture)
    else:
        parts = find_weights(source, architecture=architecture)
    chosen = measurable(chosen, parts, source, roles, asked_for=True)
    found = _of_weights(source, parts, chosen, roles, Effort(tolerance, seed), progress)
    return sorted(found, key=lambda one: chosen.index(one.metric))


def unmeasured(
    parts: Found, metrics: Sequence[str], roles: Sequence[str] = ROLES
) -> dict[str, str]:
    """Return the metrics that need parts a model does not have, and why it has none.

    Args:
        parts: what was found in the model.
        metrics: those wanted.
        roles: whose weights are probed.
    """
    why: dict[str, str] = {}
    for name in metrics:
        needs = PROBED[name].needs
        if needs == "weights" and not any(parts.of_roles(roles)):
            why[name] = next((parts.missing[it] for it in roles if it in parts.missing), "")
        elif needs == "embedding" and not parts.embeddings:
            why[name] = parts.missing.get("embedding", "no token embedding was found")
        elif needs == "activations" and not parts.mlps:
            why[name] = parts.missing.get("mlp_down", "no MLP was found")
        elif needs == "residual" and not parts.blocks:
            why[name] = "no blocks were found"
    return why


def measurable(
    metrics: tuple[str, ...],
    parts: Found,
    source: nn.Module | WeightFiles,
    roles: Sequence[str] = ROLES,
    *,
    asked_for: bool,
) -> tuple[str, ...]:
    """Return the metrics a model has the parts for.

    Args:
        metrics: those wanted.
        parts: what was found in the model.
        source: the model or its files, for the message.
        roles: whose weights are probed.
        asked_for: whether a metric without its parts is an error.

    Raises:
        UnknownArchitectureError: a metric was asked for and cannot be measured.
    """
    for role in roles:
        if role not in ROLES:
            raise JomaError(f"roles must be among {', '.join(ROLES)}, got {role!r}")
    why = unmeasured(parts, metrics, roles)
    left = tuple(metric for metric in metrics if metric not in why)
    if why and (asked_for or not left):
        metric, reason = next(iter(why.items()))
        raise UnknownArchitectureError(
            f"{metric} cannot be measured: {reason or 'no weights were found'}.\n"
            + how_to_map(source if isinstance(source, nn.Module) else source.config())
        )
    return left


def _of_weights(
    source: nn.Module | WeightFiles,
    parts: Found,
    names: Sequence[str],
    roles: Sequence[str],
    effort: Effort,
    progress: Progress,
) -> list[Measurement]:
    metrics = [PROBED[name] for name in names]
    needs = {metric.needs for metric in metrics}
    wanted = set(roles) if "weights" in needs else set()
    wanted |= needs & {"embedding"}
    together: dict[tuple[str, ...], list[Weight]] = {}  # a fused matrix is read once
    for weight in parts.of_roles(wanted):
        together.setdefault(weight.names, []).append(weight)
    total, done = sum(map(len, together.values())), 0
    found: list[Measurement] = []
    for stored, weights in together.items():
        tensors = {}
        if isinstance(source, WeightFiles):
            tensors = {name: source.read(name) for name in stored}
        for weight in weights:
            progress(f"weigh {weight.module}", done, total)
            try:
                of_model = isinstance(source, nn.Module)
                matrix = weight.of(source) if of_model else weight.matrix(tensors)
                found += _of_weight(weight, matrix.detach(), metrics, roles, effort)
            except ValueError as error:
                raise JomaError(f"{weight.module} cannot be measured: {error}") from error
            done += 1
        del tensors  # before the next are read
    return found


def _of_weight(
    weight: Weight,
    matrix: Tensor,
    metrics: Sequence[Metric],
    roles: Sequence[str],
    effort: Effort,
) -> list[Measurement]:
    if matrix.is_meta:
        raise JomaError("it is on the meta device, where it has no numbers")
    found = []
    for metric in metrics:
        if weight.role in (("embedding",) if metric.needs == "embedding" else roles):
            assert metric.measure is not None, "probed"
            estimate = metric.measure(matrix, effort)
            where = metric.name, weight.module, weight.layer, None
            found.append(Measurement(*where, estimate.value, estimate.bound))
    return found
