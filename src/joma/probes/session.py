"""A model measured once on a text, and its weights: every metric that was asked for, in a list.

Attention, the MLPs' activations and the residual stream are measured while the model computes what
it always computes; nothing of it is changed, and no table as large as an attention matrix exists.
Weights are measured one by one, from the model or straight from their files, where no model need be
built.

The hidden activations of experts whose matrices are stacked in one parameter are the input of no
module, and a fused kernel may never store them. They are computed once more, for a sample of the
tokens, from what the experts are given: hidden states and the experts chosen for each token.
"""

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from joma.common.progress import Progress, no_progress
from joma.errors import JomaError
from joma.models import (
    BlockPart,
    Found,
    Mlp,
    Weight,
    WeightFiles,
    find_stored_weights,
    find_weights,
    reader_path,
)
from joma.models.architectures import ROLES, Architecture, UnknownArchitectureError, how_to_map
from joma.probes.activations import ActivationStatisticsAccumulator
from joma.probes.attention import AttentionAccumulator
from joma.probes.embedding import EmbeddingOverlapAccumulator
from joma.probes.inputs import Inputs, ProbeBatch, Windows, batches
from joma.probes.metrics import PROBED, Effort, Metric, Needs, checked, collected
from joma.probes.tap import AttentionCall, AttentionMap, watch_attention

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
VECTORS_COMPARED = 512
"""Vectors of the residual stream compared with each other: the mean is right to about 0.01."""


@dataclass(frozen=True)
class Measurement:
    """One number of a model.

    Attributes:
        metric: Name of the metric, one of `joma.probes.metrics.METRICS`.
        module: Path of the module measured; attention of a block that runs several times in one
            forward pass has "#1", "#2", … after it from the second time on.
        layer: Number of the block, None for what is in none.
        head: Number of the head, None for the mean over heads.
        value: The number; never NaN or infinite.
        bound: An absolute bound on its error, where there is one.
        kind: Of attention: "self" or "cross", after the name of the tower where the model has
            several ("encoder self"); empty for everything else.
    """

    metric: str
    module: str
    layer: int | None
    head: int | None
    value: float
    bound: float | None = None
    kind: str = ""

    def __post_init__(self) -> None:
        for name, number in (("value", self.value), ("bound", self.bound)):
            if number is not None and not math.isfinite(number):
                raise JomaError(
                    f"{self.metric} of {self.module or 'the model'} came out with {name} {number}: "
                    "the model's weights or what it computes from the text are not finite"
                )

    def as_json(self) -> dict[str, Any]:
        """Return the number as `joma probe --json` prints it."""
        return asdict(self)


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
        architecture: a map of where its parts are; unless given, they are found by names and
            shapes. Metrics of attention alone need neither.
        parts: what `joma.models.find_weights` found in the model, where that is known already.
        metrics: which, of `METRICS`; unless given, those of `DEFAULT_METRICS` that the model has
            the parts for.
        roles: whose weights are probed, of `joma.models.ROLES`; experts each on their own.
        attention: which modules make queries and keys, where attention is written by hand.
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
        parts = parts or find_weights(model, architecture=architecture)
        chosen = measurable(chosen, parts, model, roles, asked_for=metrics is not None)
    parts = parts or Found()
    of_text = [PROBED[name] for name in chosen if name not in WEIGHT_METRICS]
    of_weights = [PROBED[name] for name in chosen if name in WEIGHT_METRICS]
    found: list[Measurement] = []
    if of_text:
        measuring = _ForwardPasses(model, parts, of_text, sample, seed)
        measuring.run(text, attention, progress)
        found += measuring.measurements()
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
    """Measure weights one by one, of a model or as they lie in files.

    From files one tensor at a time is read, measured and forgotten, so that a model far larger
    than the memory can be measured. Of a model wrapped by peft the effective weights W + scaling·BA
    are measured.

    Args:
        source: the model, or its files.
        architecture: a map of where its parts are; unless given, they are found by names and
            shapes.
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
    if parts is None:
        in_files = isinstance(source, WeightFiles)
        find: Any = find_stored_weights if in_files else find_weights
        parts = find(source, architecture=architecture)
    assert isinstance(parts, Found)
    measurable(chosen, parts, source, roles, asked_for=True)
    found = _of_weights(source, parts, asked, roles, Effort(tolerance, seed), progress)
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
    missing = parts.missing
    lacking = {
        "embedding": None if parts.embeddings else ("embedding", "no token embedding was found"),
        "activations": None if parts.mlps else ("mlp_down", "no MLP was found"),
        "residual": None if parts.blocks else ("", "no blocks were found"),
        "weights": None
        if any(parts.of_roles(roles))
        else (next((it for it in roles if it in missing), ""), "no weights were found"),
    }
    why = {name: lacking.get(PROBED[name].needs) for name in metrics}
    return {name: missing.get(*reason) for name, reason in why.items() if reason is not None}


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
        named: Any = (
            source.named_parameters() if isinstance(source, nn.Module) else source.tensors.items()
        )
        shapes = {name: tuple(it.shape) for name, it in named}
        raise UnknownArchitectureError(
            f"{metric} cannot be measured: {reason}.\n"
            + how_to_map(source if isinstance(source, nn.Module) else source.config(), shapes)
        )
    return left


def _of_weights(
    source: nn.Module | WeightFiles,
    parts: Found,
    metrics: Sequence[Metric],
    roles: Sequence[str],
    effort: Effort,
    progress: Progress,
) -> list[Measurement]:
    wanted: dict[str, list[Metric]] = {}
    for metric in metrics:
        for role in ("embedding",) if metric.needs == "embedding" else roles:
            wanted.setdefault(role, []).append(metric)
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
                found += _of_weight(weight, matrix.detach(), wanted[weight.role], effort)
            except ValueError as error:
                raise JomaError(f"{weight.module} cannot be measured: {error}") from error
            done += 1
        del tensors  # before the next are read
    return found


def _of_weight(
    weight: Weight, matrix: Tensor, metrics: Sequence[Metric], effort: Effort
) -> Iterator[Measurement]:
    if matrix.is_meta:
        raise JomaError("it is on the meta device, where it has no numbers")
    for metric in metrics:
        assert metric.measure is not None, "probed"
        estimate = metric.measure(matrix, effort)
        where = metric.name, weight.module, weight.layer, None
        yield Measurement(*where, estimate.value, estimate.bound)


@dataclass(eq=False)
class _MeasuredPart:
    """One attention, MLP or block, in one of its passes, and what accumulates its numbers."""

    module: str
    layer: int | None
    accumulator: Any
    kind: str = ""


def _unobserved(hook: Callable[..., None]) -> Callable[..., None]:
    """Return a hook whose own computations the tap's function mode does not see."""

    def run(*args: Any, **given: Any) -> None:
        with torch._C.DisableTorchFunction():
            hook(*args, **given)

    return run


class _ForwardPasses:
    """Measures a model while it reads a text.

    A module that runs several times in a forward pass (ALBERT's) is measured for each time, under
    its path and then path#1, path#2.
    """

    def __init__(
        self, model: nn.Module, parts: Found, metrics: Sequence[Metric], sample: int, seed: int
    ) -> None:
        self._model, self._parts, self._sample, self._seed = model, parts, sample, seed
        self._metrics: dict[Needs, list[Metric]] = {}
        for metric in metrics:
            self._metrics.setdefault(metric.needs, []).append(metric)
        self._collected: dict[Needs, Any] = {
            needs: collected(own) for needs, own in self._metrics.items()
        }
        self._seen: dict[tuple[Needs, str], _MeasuredPart] = {}
        self._passes: Counter[str] = Counter()
        self._batch: ProbeBatch
        self._modules = {
            reader_path(path): module
            for path, module in model.named_modules(remove_duplicate=False)
        }

    def run(
        self, text: Sequence[ProbeBatch], attention: AttentionMap | None, progress: Progress
    ) -> None:
        """Read everything."""
        device = next(self._model.parameters()).device
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode())
            stack.enter_context(_evaluating(self._model))
            if "attention" in self._metrics:
                watching = watch_attention(self._model, self._see_attention, names=attention)
                stack.enter_context(watching)
            for handle in self._hooks():
                stack.callback(handle.remove)
            for batch in text:
                progress("read the text", batch.start, batch.total)
                self._batch = batch.on(device)
                self._passes.clear()
                self._batch.run(self._model)

    def measurements(self) -> list[Measurement]:
        """Return the numbers, in the order in which the parts ran first."""
        found: list[Measurement] = []
        for (needs, _), part in self._seen.items():
            try:
                means = part.accumulator.compute()
            except ValueError as error:
                if needs != "residual":
                    raise
                raise JomaError(
                    f"{self._metrics[needs][0].name} needs a text with two different tokens at "
                    "least; leave it out of the metrics"
                ) from error
            for metric in self._metrics[needs]:
                assert metric.measure is not None, "probed"
                where = metric.name, part.module, part.layer
                if needs != "attention":
                    found.append(Measurement(*where, None, metric.measure(means)))
                    continue
                layer = metric.measure(means.layer).item()
                for head, value in [(None, layer), *enumerate(metric.measure(means).tolist())]:
                    found.append(Measurement(*where, head, value, kind=part.kind))
        return found

    def _accumulator(
        self, needs: Needs, key: str, layer: int | None, new: Callable[[], Any], kind: str = ""
    ) -> Any:
        """Return the accumulator of a part, `new()` where it is seen for the first time."""
        if (needs, key) not in self._seen:
            self._seen[needs, key] = _MeasuredPart(key, layer, new(), kind)
        return self._seen[needs, key].accumulator

    def _key(self, module: str) -> str:
        """Return the key of this pass of a module."""
        number = self._passes[module]
        self._passes[module] += 1
        return module if not number else f"{module}#{number}"

    def _hooks(self) -> Iterator[Any]:
        """Hook every MLP and block that is measured; yield what removes the hooks."""
        stacks: dict[str, list[Mlp]] = {}
        for mlp in self._parts.mlps if "activations" in self._metrics else ():
            if mlp.down_path is None:
                stacks.setdefault(mlp.module.rpartition("[")[0], []).append(mlp)
                continue
            module = self._model.get_submodule(mlp.down_path)
            yield module.register_forward_pre_hook(
                _unobserved(functools.partial(self._see_mlp, mlp))
            )
        for path, experts in stacks.items():
            hook = _unobserved(functools.partial(self._see_experts, experts))
            yield self._modules[path].register_forward_pre_hook(hook, with_kwargs=True)
        both = getattr(getattr(self._model, "config", None), "is_encoder_decoder", False)
        for block in self._parts.blocks if "residual" in self._metrics else ():
            if both and "decoder" in block.module.split("."):
                continue  # its tokens are not those the encoder reads
            hook = _unobserved(functools.partial(self._see_residual, block))
            yield self._modules[block.module].register_forward_hook(hook)

    def _see_attention(self, call: AttentionCall) -> None:
        where = "attention", call.name, call.layer, AttentionAccumulator, call.kind
        self._accumulator(*where).update(call.statistics(**self._collected["attention"]))

    def _see_mlp(self, mlp: Mlp, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        hidden = args[0].reshape(-1, args[0].shape[-1])
        hidden = self._spread(hidden) if mlp.expert is not None else self._sampled(hidden)
        self._see_activations(mlp, self._key(reader_path(mlp.down_path or "")), hidden)

    def _see_experts(
        self, experts: Sequence[Mlp], module: nn.Module, args: Any, given: Any
    ) -> None:
        activations = _expert_activations(module, [*args, *given.values()], self._sampled)
        for mlp in experts if activations else ():
            assert mlp.expert is not None
            assert mlp.down is not None
            key = self._key(mlp.down.module)
            if mlp.expert in activations:
                self._see_activations(mlp, key, activations[mlp.expert])

    def _see_activations(self, mlp: Mlp, key: str, hidden: Tensor) -> None:
        options = {"top": (), **self._collected["activations"]}
        new = functools.partial(ActivationStatisticsAccumulator, **options)
        if len(hidden):
            self._accumulator("activations", key, mlp.layer, new).update(hidden)

    def _see_residual(self, block: BlockPart, module: nn.Module, args: Any, output: Any) -> None:
        stream = output if isinstance(output, Tensor) else output[0]
        rows = stream.reshape(-1, stream.shape[-1])
        if len(rows) != self._batch.places:
            return  # which tokens these are is not known
        new = functools.partial(EmbeddingOverlapAccumulator, keep=VECTORS_COMPARED, seed=self._seed)
        accumulator = self._accumulator("residual", self._key(block.module), block.layer, new)
        accumulator.update(rows[self._batch.rows], self._batch.tokens)

    def _sampled(self, rows: Tensor) -> Tensor:
        """Return the sampled places; of a module that works on others, some evenly spaced."""
        batch = self._batch
        return rows[batch.rows] if len(rows) == batch.places else self._spread(rows)

    def _spread(self, rows: Tensor) -> Tensor:
        return rows[:: max(1, -(-len(rows) // self._sample))]


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode, and every part back as it was."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _expert_activations(
    module: nn.Module, given: Sequence[Any], sampled: Callable[[Tensor], Tensor]
) -> dict[int, Tensor]:
    """Return the hidden activations of every expert that was chosen, (tokens, nodes) each.

    Args:
        module: holds the experts, as transformers writes them; of others nothing is returned.
        given: what it is called with: hidden states, and the numbers of the experts chosen.
        sampled: picks the sampled tokens from (tokens, …).
    """
    experts: Any = module  # transformers says of each how its matrices are laid out
    own = module._parameters
    name = "gate_up_proj" if own.get("gate_up_proj") is not None else "up_proj"
    lower, bias = own.get(name), own.get(f"{name}_bias")
    gated = getattr(experts, "has_gate", True) and hasattr(experts, "_apply_gate")
    activation = experts._apply_gate if gated else getattr(experts, "act_fn", None)
    tensors = [it for it in given if isinstance(it, Tensor)]
    chosen = next((it for it in tensors if not it.is_floating_point()), None)
    if lower is None or lower.ndim != 3 or activation is None or chosen is None:
        return {}
    if not hasattr(experts, "is_transposed") or not tensors[0].is_floating_point():
        return {}
    hidden = tensors[0].reshape(-1, tensors[0].shape[-1])
    chosen = sampled(chosen.reshape(len(hidden), -1))
    hidden = sampled(hidden)
    found: dict[int, Tensor] = {}
    for expert in chosen.unique().tolist():
        if 0 <= expert < len(lower):
            rows = hidden[(chosen == expert).any(-1)]
            matrix = lower[expert].T if experts.is_transposed else lower[expert]
            first = functional.linear(rows, matrix, None if bias is None else bias[expert])
            found[expert] = activation(first)
    return found
