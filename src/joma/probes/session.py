"""A model read once over a text, and its weights: every measurement that was asked for, in a list.

Attention, the MLPs' activations and the residual stream are looked at while the model computes what
it always computes; nothing of it is changed, and no table as large as an attention matrix exists.
Weights are looked at one by one, from the model or straight from their files, where no model need
be built.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from joma.errors import JomaError
from joma.models.architectures import ROLES, Architecture, Weight, architecture_of, weights
from joma.models.weight_files import WeightFiles
from joma.probes import _checks, spectrum
from joma.probes._inputs import Inputs, Reader, Windows
from joma.probes._measurement import (
    DEFAULT_METRICS,
    METRICS,
    PAIRS_COMPARED,
    TOKENS_LOOKED_AT,
    WEIGHT_METRICS,
    Measurement,
    Progress,
    checked_metrics,
    unseen,
)
from joma.probes._reading import Reading
from joma.probes.embedding import embedding_overlap
from joma.probes.watching import AttentionMap

__all__ = [
    "DEFAULT_METRICS",
    "METRICS",
    "WEIGHT_METRICS",
    "Measurement",
    "checked_metrics",
    "probe",
    "probe_weights",
]


_TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def probe(
    model: nn.Module,
    windows: Windows | Inputs | None = None,
    *,
    inputs: Inputs | None = None,
    architecture: Architecture | None = None,
    metrics: Sequence[str] = DEFAULT_METRICS,
    roles: Sequence[str] = ROLES,
    attention: AttentionMap | None = None,
    batch: int | None = None,
    tolerance: float = 1e-3,
    sample: int = TOKENS_LOOKED_AT,
    seed: int = 0,
    progress: Progress = unseen,
) -> list[Measurement]:
    """Measure a model on windows of tokens, or on inputs of any kind.

    Means are over all tokens of all windows; what is measured of MLPs and of the residual stream,
    over a random sample of the tokens. The model runs in evaluation mode without its head, for
    nothing here looks at logits, and is left as it was.

    Args:
        model: a transformer.
        windows: (number, length), tokens.
        inputs: instead of windows: keyword arguments the model is called with, or a list of such,
            one for each forward pass. For images, sound, sequences with padding, or encoders with
            decoders; the model then runs with its head. Where `input_ids` and an `attention_mask`
            are among them, padded tokens are left out.
        architecture: where its parts are; found by its configuration unless given. Metrics of
            attention alone need none.
        metrics: which, of `METRICS`.
        roles: whose weights are probed.
        attention: for a module of one's own: which of its modules make queries and keys.
        batch: windows read at once; otherwise chosen for the device.
        tolerance: of stable ranks, relative.
        sample: tokens at which MLPs and the residual stream are looked at; all where there are not
            more.
        seed: decides the samples and where the search for singular values begins.
        progress: is told how far it is.
    """
    chosen = checked_metrics(metrics)
    reader = Reader(windows, inputs, sample, seed)
    if batch is not None:
        batch = _checks.whole("batch", batch, 1)
    of_weights = [metric for metric in chosen if metric in WEIGHT_METRICS]
    of_text = [metric for metric in chosen if metric not in WEIGHT_METRICS]
    only_attention = all(metric.startswith("attention") for metric in chosen)
    if architecture is None and not only_attention:
        architecture = architecture_of(model)
    found: list[Measurement] = []
    if of_text:
        reading = Reading(model, architecture, of_text, seed)
        reading.run(reader, batch, attention, progress)
        found += reading.measurements()
    if of_weights:
        found += probe_weights(
            model,
            architecture=architecture,
            metrics=of_weights,
            roles=roles,
            tolerance=tolerance,
            seed=seed,
            progress=progress,
        )
    return sorted(found, key=lambda one: chosen.index(one.metric))


def probe_weights(
    source: nn.Module | WeightFiles,
    *,
    architecture: Architecture | None = None,
    metrics: Sequence[str] = ("stable_rank",),
    roles: Sequence[str] = ROLES,
    tolerance: float = 1e-3,
    seed: int = 0,
    progress: Progress = unseen,
) -> list[Measurement]:
    """Measures weights one by one, of a model or as they lie in files.

    From files one tensor at a time is read, looked at and forgotten, so that a model far larger
    than the memory can be measured.

    Args:
        source: the model, or its files.
        architecture: where its parts are; found by its configuration unless given.
        metrics: which, of `WEIGHT_METRICS`.
        roles: whose weights, of `joma.models.ROLES`; those the architecture does not have are left
            out.
        tolerance: of stable ranks, relative.
        seed: decides samples and where the search for singular values begins.
        progress: is told how far it is.
    """
    chosen = checked_metrics(metrics, WEIGHT_METRICS)
    config = source.config() if isinstance(source, WeightFiles) else source
    if architecture is None:
        if config is None:
            assert isinstance(source, WeightFiles)
            raise JomaError(
                f"{source.source} has no config.json, so that it is not known which weights are "
                "what; give architecture"
            )
        architecture = architecture_of(config)
    read: Callable[[str], Tensor]
    if isinstance(source, WeightFiles):
        names, read = source.names, source.read
    else:
        parameters = dict(source.named_parameters(remove_duplicate=False))
        names, read = list(parameters), parameters.__getitem__
    heads = None if config is None else architecture.head_counts(config)[0]
    wanted = roles if {"stable_rank", "effective_rank"} & set(chosen) else ()
    if "embedding_overlap" in chosen and "embedding" not in wanted:
        wanted = ("embedding", *wanted)
    by_name: dict[str, list[Weight]] = defaultdict(list)  # a fused matrix is read once
    for weight in weights(names, architecture, wanted, heads):
        by_name[weight.name].append(weight)
    total, done = sum(map(len, by_name.values())), 0
    found: list[Measurement] = []
    for name, parts in by_name.items():
        tensor = read(name)
        if tensor.dtype not in _TYPES:
            raise JomaError(
                f"{name} is stored as {tensor.dtype}: quantized weights are not read, give the "
                "original"
            )
        for weight in parts:
            progress(f"weigh {weight.module}", done, total)
            ranks = [m for m in chosen if m == "embedding_overlap" or weight.role in roles]
            try:
                found += _of_weight(weight, tensor, ranks, tolerance, seed)
            except ValueError as error:
                raise JomaError(f"{weight.module} cannot be measured: {error}") from error
            done += 1
        del tensor  # before the next is read
    return sorted(found, key=lambda one: chosen.index(one.metric))


def _of_weight(
    weight: Weight, tensor: Tensor, metrics: Sequence[str], tolerance: float, seed: int
) -> list[Measurement]:
    matrix = weight.read(tensor)
    found = []
    for metric in metrics:
        if metric == "embedding_overlap":
            if weight.role == "embedding":
                value = embedding_overlap(matrix, pairs=PAIRS_COMPARED, seed=seed).mean
                found.append(Measurement(metric, weight.module, None, None, value))
            continue
        if metric == "stable_rank":
            estimate = spectrum.stable_rank(matrix, tolerance=tolerance, seed=seed)
        else:
            estimate = spectrum.effective_rank(matrix)
        found.append(
            Measurement(metric, weight.module, weight.layer, None, estimate.value, estimate.bound)
        )
    return found
