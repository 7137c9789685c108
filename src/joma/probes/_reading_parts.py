"""What MLPs, experts and blocks compute while a text is read."""

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from joma.errors import JomaError
from joma.models import Block, Found, Mlp, reader_path
from joma.probes._expert_activations import expert_activations
from joma.probes._measurement import TOKENS_LOOKED_AT, VECTORS_COMPARED, Measurement
from joma.probes.activations import ActivationStatistics, ActivationStatisticsAccumulator
from joma.probes.embedding import EmbeddingOverlapAccumulator

_TOP = {0.01: "mlp_top1", 0.1: "mlp_top10"}


@dataclass(eq=False)
class _Seen:
    """What was seen of one part in one pass."""

    module: str
    layer: int | None
    sums: Any


class PartsReading:
    """Looks at the hidden activations of every MLP and at the output of every block.

    A module that runs several times in a forward pass (ALBERT's) is measured for each time, under
    its path and then path#1, path#2.

    Args:
        model: the model.
        parts: what was found in it.
        metrics: those wanted.
        sample: tokens looked at where a module works on other tokens than those of the text.
        seed: decides the sample of vectors.
    """

    def __init__(
        self,
        model: nn.Module,
        parts: Found | None,
        metrics: Sequence[str],
        sample: int = TOKENS_LOOKED_AT,
        seed: int = 0,
    ) -> None:
        self._model, self._parts, self._metrics = model, parts, metrics
        self._sample, self._seed = sample, seed
        self._top = tuple(share for share, name in _TOP.items() if name in metrics)
        self._mlps: dict[str, _Seen] = {}
        self._residuals: dict[str, _Seen] = {}
        self._passes: Counter[str] = Counter()
        self._rows = self._tokens = torch.empty(0, dtype=torch.long)
        self._places = 0

    def begin(self, rows: Tensor, tokens: Tensor, places: int) -> None:
        """Says what the next forward pass reads.

        Args:
            rows: numbers of the places looked at, of all places in the batch.
            tokens: the tokens at these.
            places: how many there are.
        """
        self._rows, self._tokens, self._places = rows, tokens, places
        self._passes.clear()

    @contextlib.contextmanager
    def hooked(self) -> Iterator[None]:
        """Looks while the block lasts."""
        wanted = {metric.partition("_")[0] for metric in self._metrics} & {"mlp", "residual"}
        handles = []
        try:
            if "mlp" in wanted:
                handles += list(self._hook_mlps())
            if "residual" in wanted:
                assert self._parts is not None, "`probe` asks for it"
                for block in self._parts.blocks:
                    module = self._modules[block.module]
                    if not self._reads_other_tokens(block):
                        handles.append(module.register_forward_hook(self._residual_hook(block)))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def measurements(self) -> list[Measurement]:
        """What was seen, in the order in which the parts ran first."""
        found: list[Measurement] = []
        for mlp in self._mlps.values():
            found += self._of_mlp(mlp, mlp.sums.compute())
        for residual in self._residuals.values():
            try:
                overlap = residual.sums.compute().mean
            except ValueError as error:
                raise JomaError(
                    "residual_overlap needs a text with two different tokens at least; leave it "
                    "out of the metrics"
                ) from error
            where = residual.module, residual.layer
            found.append(Measurement("residual_overlap", *where, None, overlap))
        return found

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
    def _modules(self) -> dict[str, nn.Module]:
        return {reader_path(name): module for name, module in self._model.named_modules()}

    def _key(self, module: str) -> str:
        """The key of this pass of a module."""
        number = self._passes[module]
        self._passes[module] += 1
        return module if not number else f"{module}#{number}"

    def _mlp_hook(self, mlp: Mlp) -> Callable[..., None]:
        def record(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            hidden = inputs[0].reshape(-1, inputs[0].shape[-1])
            hidden = self._spread(hidden) if mlp.expert is not None else self._some(hidden)
            self._add(mlp, self._key(reader_path(mlp.down_path or mlp.module)), hidden)

        return record

    def _stack_hook(self, experts: Sequence[Mlp]) -> Callable[..., None]:
        def record(module: nn.Module, inputs: Any, options: Any) -> None:
            made = expert_activations(module, inputs, options, self._some)
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
        if key not in self._mlps:
            sums = ActivationStatisticsAccumulator(top=self._top)
            self._mlps[key] = _Seen(key, mlp.layer, sums)
        self._mlps[key].sums.update(hidden)

    def _some(self, rows: Tensor) -> Tensor:
        """The places looked at; of a module that works on others, some evenly spaced."""
        return rows[self._rows] if len(rows) == self._places else self._spread(rows)

    def _spread(self, rows: Tensor) -> Tensor:
        return rows[:: max(1, -(-len(rows) // self._sample))]

    def _reads_other_tokens(self, block: Block) -> bool:
        """Return whether a block is of a decoder whose tokens are not those the encoder reads."""
        config = getattr(self._model, "config", None)
        both = getattr(config, "is_encoder_decoder", False)
        return bool(both) and "decoder" in block.module.split(".")

    def _residual_hook(self, block: Block) -> Callable[..., None]:
        def record(module: nn.Module, inputs: Any, output: Any) -> None:
            stream = output if isinstance(output, Tensor) else output[0]
            rows = stream.reshape(-1, stream.shape[-1])
            if len(rows) != self._places:
                return  # which tokens these are is not known
            key = self._key(block.module)
            if key not in self._residuals:
                sums = EmbeddingOverlapAccumulator(keep=VECTORS_COMPARED, seed=self._seed)
                self._residuals[key] = _Seen(key, block.layer, sums)
            self._residuals[key].sums.update(rows[self._rows], self._tokens)

        return record

    def _of_mlp(self, seen: _Seen, of: ActivationStatistics) -> list[Measurement]:
        values = {
            "mlp_inactive": of.near_zero,
            "mlp_zero": of.zero,
            "mlp_dead": of.dead / len(of.activity),
            "mlp_kurtosis": of.kurtosis,
            **{_TOP[share]: energy for share, energy in of.top_energy.items()},
        }
        return [
            Measurement(metric, seen.module, seen.layer, None, values[metric])
            for metric in self._metrics
            if metric in values
        ]
