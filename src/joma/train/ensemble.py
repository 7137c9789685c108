"""N networks trained as one program: stacked weights, one optimizer, one captured step."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from joma.common.float32 import float32_products
from joma.data import Batch
from joma.errors import JomaError
from joma.models import Transformer
from joma.optim import StackedAdam, StackedSGD


class Network(Protocol):
    """E networks as one module, as `joma.models` has them."""

    seeds: tuple[int, ...]
    compute: torch.dtype | None

    def parameters(self) -> Iterator[nn.Parameter]:
        """All of them, with the member axis first."""
        ...

    def products(self) -> Iterable[str]:
        """Names of the parameters that activations are multiplied with."""
        ...

    def settings(self) -> dict[str, Any]:
        """What the networks are made of, for a checkpoint to be known by."""
        ...


N = TypeVar("N", bound=Network)

Batches = Callable[[int | Tensor], Any]
"""Gives the batch of a step; every member's part of it must depend on that member's seed alone."""

Loss = Callable[[N, Any, Tensor], Tensor]
"""Of networks on a batch at a step: one number for each member, (E,).

It has a graph to go back through, or has left the gradients with the parameters already.
"""

PRECISIONS = ("float32", "float64", "tf32", "bfloat16")
"""Of matrix products, in "bfloat16" of activations too; the last two on GPUs alone.

Parameters and the optimizer stay in float32 (float64 in "float64"); in "bfloat16" the gradients of
the blocks' matrices are rounded to it before the optimizer reads them.
"""

KEPT = 100
"""Losses that stay on the device before they must be fetched."""

_WARM_UPS = 3  # as many as torch advises before a capture


def classification_loss(model: Transformer, batch: Batch, step: Tensor) -> Tensor:
    """Cross-entropy of each member on its part of a batch, (E,)."""
    del step  # nothing is drawn
    return weighted_cross_entropy(model(batch.tokens, leading=batch.leading), batch)


class Ensemble(Generic[N]):
    """Networks, their optimizer and their data, and the step that moves all of them.

    A member follows the trajectory of the same network trained alone: the members share no
    operation but the launch. On the GPU the whole step, drawing the data included, is captured once
    as a CUDA graph and replayed.

    Args:
        model: the networks.
        optimizer: of the model's parameters.
        batches: the data of each step; called with the step counter as a tensor.
        loss: what is made small; the cross-entropy of the classes unless given.
        precision: one of `PRECISIONS`.
        restart_every: steps after which the optimizer begins anew, as where every epoch makes one.
    """

    def __init__(
        self,
        model: N,
        optimizer: StackedAdam | StackedSGD,
        batches: Batches,
        *,
        loss: Loss[N] = classification_loss,
        precision: str = "float32",
        restart_every: int | None = None,
    ) -> None:
        if precision not in PRECISIONS:
            raise JomaError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
        dtype, self.device = (next(model.parameters()).dtype, next(model.parameters()).device)
        if precision in ("tf32", "bfloat16") and self.device.type != "cuda":
            raise JomaError(f"precision {precision} is for a CUDA device, not {self.device}")
        if (precision == "float64") != (dtype == torch.float64):
            raise JomaError(f"precision {precision} does not fit parameters in {dtype}")
        if restart_every is not None and restart_every < 1:
            raise JomaError(f"restart_every must be at least 1, got {restart_every}")
        self.model, self.optimizer, self.batches = model, optimizer, batches
        self.precision, self.restart_every = precision, restart_every
        self._loss = loss
        if precision == "bfloat16":
            optimizer.halve(model.products())
        self.members = len(model.seeds)
        self.step = 0
        self._counter = torch.zeros((), dtype=torch.int64, device=self.device)
        self._losses = torch.zeros(KEPT, self.members, dtype=torch.float64, device=self.device)
        self._fetched = 0
        self._replay: Callable[[], None] | None = None
        self.captured_on: torch.cuda.Stream | None = None
        """The stream whose scratch memory the captured step uses."""

    def advance(self, steps: int) -> None:
        """Makes `steps` steps; at most `KEPT` between two calls of `losses`."""
        if self.step + steps - self._fetched > KEPT:
            raise JomaError(f"steps must leave at most {KEPT} losses to fetch, got {steps}")
        with self.computing():
            one = self._one_step if self.device.type != "cuda" else self._replay or self._capture()
            for step in range(self.step, self.step + steps):
                if self.restart_every is not None and step and step % self.restart_every == 0:
                    self.optimizer.restart()
                one()
        self.step += steps

    def losses(self) -> tuple[range, Tensor]:
        """The steps since the last call and their losses, before each step's update: (steps, E)."""
        steps = range(self._fetched, self.step)
        self._fetched = self.step
        return steps, self._losses.cpu()[[step % KEPT for step in steps]]

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """The precision of the block's products; what was set before comes back."""
        coarse, half = self.precision in ("tf32", "bfloat16"), self.precision == "bfloat16"
        with float32_products("tf32" if coarse else "ieee"):
            try:
                self.model.compute = torch.bfloat16 if half else None
                yield
            finally:
                self.model.compute = None

    @contextlib.contextmanager
    def looking(self) -> Iterator[N]:
        """The networks to look at, without gradients and in no coarser precision than tf32."""
        with self.computing(), self.optimizer.whole(), torch.no_grad():
            self.model.compute = None
            yield self.model

    def state(self) -> dict[str, Tensor]:
        """All that decides what comes next; random numbers follow from seeds and step."""
        return {
            "step": torch.tensor(self.step),
            "seeds": torch.tensor(self.model.seeds),
            **{f"model.{name}": p for name, p in self.optimizer.originals().items()},
            **{f"optimizer.{name}": part for name, part in self.optimizer.state().items()},
        }

    @torch.no_grad()
    def load(self, state: dict[str, Tensor]) -> None:
        """Goes back to a state that `state` gave, of the same networks."""
        own = self.state()
        if own.keys() != state.keys():
            odd = ", ".join(sorted(own.keys() ^ state.keys())[:3])
            raise JomaError(f"state must be of these networks; {odd} … is in one of the two only")
        for name, tensor in own.items():
            if tensor.shape != state[name].shape or tensor.dtype != state[name].dtype:
                raise JomaError(
                    f"state must be of these networks; {name} is {tuple(state[name].shape)} in "
                    f"{state[name].dtype}, but must be {tuple(tensor.shape)} in {tensor.dtype}"
                )
        if not torch.equal(own["seeds"], state["seeds"]):
            raise JomaError(
                f"state must be of seeds {own['seeds'].tolist()}, got {state['seeds'].tolist()}"
            )
        for name, tensor in own.items():
            tensor.copy_(state[name])
        self.step = self._fetched = int(state["step"])
        self._counter.fill_(self.step)
        self.optimizer.refresh()

    def _one_step(self) -> None:
        loss_E = self._backward()
        self.optimizer.step()
        self._losses.index_copy_(0, (self._counter % KEPT).view(1), loss_E.view(1, -1))
        self._counter += 1

    def _backward(self) -> Tensor:
        self.optimizer.zero_grad()
        loss_E = self._loss(self.model, self.batches(self._counter), self._counter)
        if loss_E.requires_grad:
            loss_E.sum().backward()  # each member's gradient is that of its own loss
        return loss_E.detach().double()

    def _capture(self) -> Callable[[], None]:
        """Captures a step without making one: what warms up must not move a parameter.

        Graphs captured on one stream share the scratch memory of its matrix products, so that two
        of them replayed at the same time spoil each other's: where the current stream is not the
        one all work is on by default, the graph is of that stream, and otherwise of a new one.
        """
        current = torch.cuda.current_stream()
        usual = current == torch.cuda.default_stream()
        beside = torch.cuda.Stream() if usual else current
        beside.wait_stream(current)
        with torch.cuda.stream(beside):
            for _ in range(_WARM_UPS):
                self._backward()
            self.optimizer.warm_up()
        current.wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        self.optimizer.zero_grad()
        with torch.cuda.graph(graph, stream=beside):
            self._one_step()
        self.optimizer.captured()
        self._replay, self.captured_on = graph.replay, beside
        return graph.replay


def weighted_cross_entropy(outputs_EBC: Tensor, batch: Batch) -> Tensor:
    """Mean cross-entropy of each member's rows, as often as each counts: (E,)."""
    each = functional.cross_entropy(
        outputs_EBC.flatten(0, 1), batch.labels.flatten(), reduction="none"
    )
    each_EB = each.view_as(batch.labels)
    if batch.weights is None:
        return each_EB.mean(-1)
    return (each_EB * batch.weights.to(each_EB.dtype)).sum(-1)
