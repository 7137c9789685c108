"""Measurements of a model that reads a text: attention, MLPs and the residual stream.

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

from joma.common.progress import Progress
from joma.errors import JomaError
from joma.models import BlockPart, Found, Mlp, reader_path
from joma.probes.activations import ActivationStatisticsAccumulator
from joma.probes.attention import AttentionAccumulator
from joma.probes.embedding import EmbeddingOverlapAccumulator
from joma.probes.inputs import ProbeBatch
from joma.probes.metrics import Metric, Needs, collected
from joma.probes.tap import AttentionCall, AttentionMap, watch_attention

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


@dataclass(eq=False)
class _Seen:
    """What was seen of one attention, MLP or block, in one of its passes."""

    module: str
    layer: int | None
    sums: Any
    kind: str = ""


def read(
    model: nn.Module,
    parts: Found | None,
    metrics: Sequence[Metric],
    batches: Sequence[ProbeBatch],
    attention: AttentionMap | None,
    *,
    sample: int,
    seed: int,
    progress: Progress,
) -> list[Measurement]:
    """Measure a model while it reads a text.

    A module that runs several times in a forward pass (ALBERT's) is measured for each time, under
    its path and then path#1, path#2.

    Args:
        model: The model.
        parts: What was found in it, None where only its attention is measured.
        metrics: The metrics, of "attention", "activations" and "residual".
        batches: The text.
        attention: As of `joma.probes.probe`.
        sample: Tokens measured where a module works on other tokens than those of the text.
        seed: Seed of the sample of vectors.
        progress: Called with how far it is.
    """
    reading = _Reading(model, parts, metrics, sample, seed)
    reading.run(batches, attention, progress)
    return reading.measurements()


class _Reading:
    def __init__(
        self,
        model: nn.Module,
        parts: Found | None,
        metrics: Sequence[Metric],
        sample: int,
        seed: int,
    ) -> None:
        self._model, self._parts, self._metrics = model, parts, metrics
        self._sample, self._seed = sample, seed
        self._collected: dict[Needs, Any] = {
            needs: collected(self._of(needs)) for needs in ("attention", "activations")
        }
        self._seen: dict[Needs, dict[str, _Seen]] = {}
        self._passes: Counter[str] = Counter()
        self._rows = self._tokens = torch.empty(0, dtype=torch.long)
        self._places = 0

    def run(
        self, batches: Sequence[ProbeBatch], attention: AttentionMap | None, progress: Progress
    ) -> None:
        """Read everything."""
        device = next(self._model.parameters()).device
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode())
            stack.enter_context(_evaluating(self._model))
            if self._of("attention"):
                stack.enter_context(watch_attention(self._model, self._see, names=attention))
            for handle in self._hooks():
                stack.callback(handle.remove)
            for batch in batches:
                progress("read the text", batch.start, batch.total)
                self._rows, self._tokens = batch.rows.to(device), batch.tokens.to(device)
                self._places = batch.places
                self._passes.clear()
                batch.run(self._model, device)

    def measurements(self) -> list[Measurement]:
        """Return the numbers, in the order in which the parts ran first."""
        found: list[Measurement] = []
        for seen in self._seen.get("attention", {}).values():
            means = seen.sums.compute()
            for metric in self._of("attention"):
                assert metric.measure is not None, "probed"
                values = [metric.measure(means.layer).item(), *metric.measure(means).tolist()]
                heads = [None, *range(len(means.rows))]
                found += [
                    Measurement(metric.name, seen.module, seen.layer, head, value, kind=seen.kind)
                    for head, value in zip(heads, values, strict=True)
                ]
        for needs in ("activations", "residual"):
            for seen in self._seen.get(needs, {}).values():
                try:
                    sums = seen.sums.compute()
                except ValueError as error:
                    if needs != "residual":
                        raise
                    raise JomaError(
                        f"{self._of(needs)[0].name} needs a text with two different tokens at "
                        "least; leave it out of the metrics"
                    ) from error
                found += [
                    Measurement(metric.name, seen.module, seen.layer, None, metric.measure(sums))
                    for metric in self._of(needs)
                    if metric.measure is not None
                ]
        return found

    def _of(self, needs: Needs) -> list[Metric]:
        return [metric for metric in self._metrics if metric.needs == needs]

    def _sums(self, needs: Needs, key: str, layer: int | None, new: Any, kind: str = "") -> Any:
        """Return the accumulator of a part, `new()` where it is seen for the first time."""
        seen = self._seen.setdefault(needs, {})
        if key not in seen:
            seen[key] = _Seen(key, layer, new(), kind)
        return seen[key].sums

    def _see(self, call: AttentionCall) -> None:
        statistics = call.statistics(**self._collected["attention"])
        sums = self._sums("attention", call.name, call.layer, AttentionAccumulator, call.kind)
        sums.update(statistics)

    def _hooks(self) -> Iterator[Any]:
        """Hook every MLP and block that is measured; yield what removes the hooks."""
        if self._of("activations"):
            yield from self._hook_mlps()
        if self._of("residual"):
            assert self._parts is not None, "`probe` asks for it"
            for block in self._parts.blocks:
                if not self._reads_other_tokens(block):
                    module = self._modules[block.module]
                    yield module.register_forward_hook(self._residual_hook(block))

    def _hook_mlps(self) -> Iterator[Any]:
        assert self._parts is not None, "`probe` asks for it"
        stacks: dict[str, list[Mlp]] = {}
        for mlp in self._parts.mlps:
            if mlp.down_path is None:
                stacks.setdefault(mlp.module.rpartition("[")[0], []).append(mlp)
                continue
            module = self._model.get_submodule(mlp.down_path)
            yield module.register_forward_pre_hook(self._mlp_hook(mlp))
        for path, experts in stacks.items():
            module = self._modules[path]
            yield module.register_forward_pre_hook(self._stack_hook(experts), with_kwargs=True)

    @functools.cached_property
    def _paths(self) -> dict[str, str]:
        """Paths of all modules as they are reported."""
        names = (name for name, _ in self._model.named_modules(remove_duplicate=False))
        return {name: reader_path(name) for name in names}

    @functools.cached_property
    def _modules(self) -> dict[str, nn.Module]:
        return {self._paths[name]: module for name, module in self._model.named_modules()}

    def _key(self, module: str) -> str:
        """Return the key of this pass of a module."""
        number = self._passes[module]
        self._passes[module] += 1
        return module if not number else f"{module}#{number}"

    def _mlp_hook(self, mlp: Mlp) -> Callable[..., None]:
        def record(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            hidden = inputs[0].reshape(-1, inputs[0].shape[-1])
            hidden = self._spread(hidden) if mlp.expert is not None else self._some(hidden)
            self._add(mlp, self._key(self._paths[mlp.down_path or ""]), hidden)

        return record

    def _stack_hook(self, experts: Sequence[Mlp]) -> Callable[..., None]:
        def record(module: nn.Module, inputs: Any, options: Any) -> None:
            made = _expert_activations(module, inputs, options, self._some)
            if made is None:
                return
            for mlp in experts:
                assert mlp.expert is not None
                assert mlp.down is not None
                key = self._key(mlp.down.module)
                if mlp.expert in made:
                    self._add(mlp, key, made[mlp.expert])

        return record

    def _add(self, mlp: Mlp, key: str, hidden: Tensor) -> None:
        if not len(hidden):
            return
        options = {"top": (), **self._collected["activations"]}
        new = functools.partial(ActivationStatisticsAccumulator, **options)
        self._sums("activations", key, mlp.layer, new).update(hidden)

    def _some(self, rows: Tensor) -> Tensor:
        """Return the sampled places; of a module that works on others, some evenly spaced."""
        return rows[self._rows] if len(rows) == self._places else self._spread(rows)

    def _spread(self, rows: Tensor) -> Tensor:
        return rows[:: max(1, -(-len(rows) // self._sample))]

    def _reads_other_tokens(self, block: BlockPart) -> bool:
        """Return whether a block is of a decoder whose tokens are not those the encoder reads."""
        config = getattr(self._model, "config", None)
        both = getattr(config, "is_encoder_decoder", False)
        return bool(both) and "decoder" in block.module.split(".")

    def _residual_hook(self, block: BlockPart) -> Callable[..., None]:
        def record(module: nn.Module, inputs: Any, output: Any) -> None:
            stream = output if isinstance(output, Tensor) else output[0]
            rows = stream.reshape(-1, stream.shape[-1])
            if len(rows) != self._places:
                return  # which tokens these are is not known
            key = self._key(block.module)
            new = functools.partial(
                EmbeddingOverlapAccumulator, keep=VECTORS_COMPARED, seed=self._seed
            )
            sums = self._sums("residual", key, block.layer, new)
            sums.update(rows[self._rows], self._tokens)

        return record


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
    module: nn.Module,
    inputs: Sequence[Any],
    options: Mapping[str, Any],
    some: Callable[[Tensor], Tensor],
) -> dict[int, Tensor] | None:
    """Return the hidden activations of every expert that was chosen, (tokens, nodes) each.

    Args:
        module: holds the experts, as transformers writes them.
        inputs: what it is called with.
        options: the same by name.
        some: picks the sampled tokens from (tokens, …).

    Returns:
        None where the module is of another kind.
    """
    given: Any = module  # transformers says of each how its matrices are laid out
    lower = module._parameters.get("gate_up_proj", module._parameters.get("up_proj"))
    gated = getattr(given, "has_gate", True) and hasattr(given, "_apply_gate")
    activation = given._apply_gate if gated else getattr(given, "act_fn", None)
    if lower is None or lower.ndim != 3 or activation is None:
        return None
    if not hasattr(given, "is_transposed"):
        return None
    hidden = inputs[0] if inputs else options.get("hidden_states")
    chosen = _chosen(inputs, options)
    if not isinstance(hidden, Tensor) or chosen is None:
        return None
    hidden = hidden.reshape(-1, hidden.shape[-1])
    hidden, chosen = some(hidden), some(chosen.reshape(len(hidden), -1))
    bias = module._parameters.get("gate_up_proj_bias", module._parameters.get("up_proj_bias"))
    made: dict[int, Tensor] = {}
    with torch.no_grad():
        for expert in chosen.unique().tolist():
            if not 0 <= expert < len(lower):
                continue
            rows = hidden[(chosen == expert).any(-1)]
            matrix = lower[expert].T if given.is_transposed else lower[expert]
            first = functional.linear(rows, matrix, None if bias is None else bias[expert])
            made[expert] = activation(first)
    return made


def _chosen(inputs: Sequence[Any], options: Mapping[str, Any]) -> Tensor | None:
    """Return the numbers of the experts chosen for each token."""
    every = [*inputs[1:], *options.values()]
    whole = [it for it in every if isinstance(it, Tensor) and not it.is_floating_point()]
    return whole[0] if whole else None
