"""What a forward pass over held inputs shows: attention, MLP activity, and Theorem 1."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from joma.probes import AttentionAccumulator, AttentionCall, AttentionMap, watch_attention
from joma.probes.activations import NEAR
from joma.train.monitor._faults import Faults
from joma.train.monitor._held import Held
from joma.train.monitor._parts import Parts
from joma.train.monitor._row import Row
from joma.train.monitor._tensors import Tensors
from joma.train.monitor._theorem1 import Theorem1


@dataclass(eq=False)
class _Attention:
    """What was seen of one attention: of a module, in one of its passes."""

    layer: int
    kind: str
    real: AttentionAccumulator = field(default_factory=AttentionAccumulator)
    even: AttentionAccumulator = field(default_factory=AttentionAccumulator)

    def rows(self, key: str, even: float) -> list[Row]:
        means = self.real.compute()
        where: dict[str, Any] = {"module": key, "layer": self.layer, "kind": self.kind}
        rows = [Row("attention_uniform", even, **where)]
        for name, of in (("attention_entropy", "entropy"), ("attention_effective", "effective")):
            rows.append(Row(name, float(getattr(means.layer, of)), **where))
            values = getattr(means, of).tolist()
            rows += [Row(name, v, **where, head=head) for head, v in enumerate(values)]
        return rows


class Reading:
    """Forward passes over held inputs, measurement after measurement.

    What fails in here is noted and ends no forward pass: with sharded weights the other processes
    would wait for it.

    Args:
        attention: Where queries and keys are made, for a model that does not tell.
        theorem1: Layer on which the residual of Theorem 1 is measured, or None.
        faults: Where failures are noted.
    """

    def __init__(
        self, attention: AttentionMap | None, theorem1: int | None, faults: Faults
    ) -> None:
        self._names = attention
        self._faults = faults
        self.theorem1 = None if theorem1 is None else Theorem1(theorem1)
        self._even: dict[str, float] = {}

    def attend(self, model: nn.Module, held: Held, parts: Parts, lower: Tensor | None) -> list[Row]:
        """Run the model and return what was seen of its attention and of Theorem 1.

        Args:
            model: The model, uncompiled, in evaluation mode.
            held: What it is called with.
            parts: Where its blocks are.
            lower: The lower MLP weight of the layer on which Theorem 1 is measured, (K, d).
        """
        seen: dict[str, _Attention] = {}
        theorem = self.theorem1 if lower is not None else None

        def see(call: AttentionCall) -> None:
            if self._faults.is_off("attention", call.name):
                return
            try:
                self._see(seen, call, theorem)
            except Exception as error:
                seen.pop(call.name, None)
                self._faults.note("attention", error, module=call.name)

        with ExitStack() as stack:
            if theorem is not None:
                stack.enter_context(theorem.watching(model, parts))
            stack.enter_context(watch_attention(model, see, names=self._names))
            held.run(model)
        rows: list[Row] = []
        for key, one in seen.items():
            rows += self._faults.tried("attention", lambda k=key, o=one: self._rows(k, o)) or []
        if theorem is not None and lower is not None:
            rows += self._faults.tried("theorem1_residual", lambda: theorem.rows(lower)) or []
        return rows

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what Theorem 1 has added up so far, by name."""
        if self.theorem1 is not None:
            yield from self.theorem1.state()

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take what `state` gave."""
        if self.theorem1 is not None:
            self.theorem1.load(state)

    def _see(
        self, seen: dict[str, _Attention], call: AttentionCall, theorem: Theorem1 | None
    ) -> None:
        one = seen.setdefault(call.name, _Attention(call.layer, call.kind))
        one.real.update(call.statistics())
        if call.name not in self._even:
            one.even.update(call.uniform().statistics())
        if theorem is not None and call.layer == theorem.layer:
            theorem.see(call)

    def _rows(self, key: str, one: _Attention) -> list[Row]:
        if key not in self._even:
            self._even[key] = float(one.even.compute().layer.entropy)
        return one.rows(key, self._even[key])


@contextmanager
def watching_activity(
    tensors: Tensors, downs: dict[str, int | None], faults: Faults
) -> Iterator[list[Row]]:
    """Yield a list that holds, when the block ends, the share of dead nodes of every MLP.

    A node is dead where it is near zero at every token: |a| ≤ 0.01 of the token's root mean square.

    Args:
        tensors: The model's modules by path.
        downs: By path of an MLP's second linear map, whose input is looked at, the layer.
        faults: Where failures are noted.
    """
    active: dict[str, Tensor] = {}
    rows: list[Row] = []

    def see(path: str, args: tuple[Any, ...]) -> None:
        try:
            hidden = args[0].detach().flatten(0, -2).float()
            near = NEAR * hidden.square().mean(-1, keepdim=True).sqrt()
            alive = (hidden.abs() > near).any(0)
            active[path] = active[path] | alive if path in active else alive
        except Exception as error:
            active.pop(path, None)
            faults.note("mlp_dead", error, module=path)

    handles = []
    for path in downs:
        module = tensors.module(path)
        if module is None or faults.is_off("mlp_dead", path):
            continue

        def hook(_: nn.Module, args: tuple[Any, ...], at: str = path) -> None:
            see(at, args)

        handles.append(module.register_forward_pre_hook(hook))
    try:
        yield rows
    finally:
        for handle in handles:
            handle.remove()
    for path, alive in active.items():
        rows.append(Row("mlp_dead", 1 - float(alive.float().mean()), path, downs[path]))
