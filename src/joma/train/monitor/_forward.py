"""What a forward pass over the inputs shows: attention, MLP activity, and Theorem 1."""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from joma.probes import AttentionAccumulator, AttentionCall, AttentionMap, watch_attention
from joma.probes.metrics import Metric, collected
from joma.train.monitor._faults import Faults
from joma.train.monitor._inputs import MeasurementInputs
from joma.train.monitor._record import Row
from joma.train.monitor._selection import Selection, plain
from joma.train.monitor._theorem1 import Theorem1
from joma.train.processes import Gathers, MonitoredProcesses


class ForwardPass:
    """Forward passes over the same inputs, measurement after measurement.

    What fails in a hook is noted and ends no forward pass: with sharded weights the other processes
    would wait for it.

    Args:
        metrics: The metrics to measure; those of attention, activations and Theorem 1 are here.
        attention: Where queries and keys are made, for a model that does not say it itself.
        theorem1: Layer on which the residual of Theorem 1 is measured, or None.
        processes: The processes that train the model.
        faults: Where failures are noted.

    Attributes:
        theorem1: What measures Theorem 1, or None.
    """

    def __init__(
        self,
        metrics: Sequence[Metric],
        attention: AttentionMap | None,
        theorem1: int | None,
        processes: MonitoredProcesses,
        faults: Faults,
    ) -> None:
        self._attention = [metric for metric in metrics if metric.needs == "attention"]
        self._collected: dict[str, Any] = collected(self._attention)
        self._activations = [metric for metric in metrics if metric.needs == "activations"]
        of_layer = any(metric.needs == "theorem1" for metric in metrics)
        self.theorem1 = Theorem1(theorem1) if of_layer and theorem1 is not None else None
        self._names, self._processes, self._faults = attention, processes, faults
        self._gathers = Gathers()
        self._even: dict[str, float] = {}

    def measure(
        self,
        model: nn.Module,
        candidates: Sequence[MeasurementInputs],
        chosen: Selection,
        lower: Tensor | None,
    ) -> tuple[list[Row], MeasurementInputs]:
        """Run the model and return what that shows, and the inputs that it ran on.

        Args:
            model: The model, uncompiled, in evaluation mode.
            candidates: What it may be called with; the first that it takes counts.
            chosen: Where its blocks and MLPs are.
            lower: The lower MLP weight of the layer on which Theorem 1 is measured, (K, d).
        """
        modules = {plain(name): module for name, module in model.named_modules()}
        off = self._faults.off
        active = [metric for metric in self._activations if (metric.name, None) not in off]
        attends = bool(self._attention or self.theorem1) and ("attention", None) not in off
        passes = ["attention"] if attends else []
        if active and chosen.downs:  # seen also where attention cannot be
            passes.append(active[0].name)
        for what in passes:
            why: Exception | str = "the forward pass failed in another process"
            for inputs in candidates:
                failed, rows = False, []
                try:
                    with self._gathers.completed(model), ExitStack() as stack:
                        sums = stack.enter_context(self._activity(modules, chosen, active))
                        if what == "attention":
                            rows = self._attend(model, inputs, modules, chosen, lower)
                        else:
                            inputs.run(model, self._processes.device)
                    for (name, path), one in sums.items():
                        rows.append(Row(name, one.compute(), path, chosen.downs[path]))
                except Exception as error:  # the model's own code, which may fail as it likes
                    failed, why = True, error
                if not (self._processes.any(failed) if self._processes.together else failed):
                    return [row for row in rows if math.isfinite(row.value)], inputs
            self._faults.note(what, why)
        return [], candidates[0]

    def _attend(
        self,
        model: nn.Module,
        inputs: MeasurementInputs,
        modules: dict[str, nn.Module],
        chosen: Selection,
        lower: Tensor | None,
    ) -> list[Row]:
        """Run the model and return what was seen of its attention and of Theorem 1."""
        seen: dict[str, tuple[AttentionCall, AttentionAccumulator, AttentionAccumulator]] = {}
        theorem = self.theorem1 if lower is not None else None

        def see(call: AttentionCall) -> None:
            key = call.name
            if ("attention", key) in self._faults.off:
                return
            with self._faults.guard("attention", module=key):
                if key not in seen:
                    seen[key] = call, AttentionAccumulator(), AttentionAccumulator()
                _, real, even = seen[key]
                real.update(call.statistics(**self._collected))
                if key not in self._even:
                    even.update(call.uniform().statistics())
                if theorem is not None and call.layer == theorem.layer:
                    theorem.see(call)
                return
            seen.pop(key, None)

        with ExitStack() as stack:
            if theorem is not None:
                block = modules[chosen.blocks[theorem.layer]]
                stack.enter_context(theorem.following(block))
            stack.enter_context(watch_attention(model, see, names=self._names))
            inputs.run(model, self._processes.device)
        rows: list[Row] = []
        with self._faults.guard("attention"):
            for key, (call, real, even) in seen.items():
                if key not in self._even:
                    self._even[key] = float(even.compute().layer.entropy)
                rows += self._rows(key, call, real)
        if theorem is not None and lower is not None:
            with self._faults.guard("theorem1_residual"):
                rows += theorem.rows(lower)
        return rows

    def _rows(self, key: str, call: AttentionCall, real: AttentionAccumulator) -> list[Row]:
        means = real.compute()
        where: dict[str, Any] = {"module": key, "layer": call.layer, "kind": call.kind}
        rows = [Row("attention_uniform", self._even[key], **where)]
        for metric in self._attention:
            assert metric.measure is not None, "of attention"
            rows.append(Row(metric.name, float(metric.measure(means.layer)), **where))
            values = metric.measure(means).tolist()
            rows += [Row(metric.name, v, **where, head=head) for head, v in enumerate(values)]
        return rows

    @contextmanager
    def _activity(
        self, modules: dict[str, nn.Module], chosen: Selection, metrics: Sequence[Metric]
    ) -> Iterator[dict[tuple[str, str], Any]]:
        """Yield, by metric and path, what is summed up of every MLP's activations in the block."""
        sums: dict[tuple[str, str], Any] = {}

        def watch(metric: Metric, path: str) -> Any:
            def update(_: nn.Module, args: tuple[Any, ...]) -> None:
                assert metric.streamed is not None, "monitored"
                with self._faults.guard(metric.name, module=path):
                    hidden = args[0].detach().flatten(0, -2).float()
                    sums.setdefault((metric.name, path), metric.streamed()).update(hidden)
                    return
                sums.pop((metric.name, path), None)

            return update

        with ExitStack() as stack:
            for path in chosen.downs:
                for metric in metrics:
                    if path in modules and (metric.name, path) not in self._faults.off:
                        hook = modules[path].register_forward_pre_hook(watch(metric, path))
                        stack.callback(hook.remove)
            yield sums
