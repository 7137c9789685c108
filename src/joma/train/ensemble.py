"""N networks trained as one program: stacked weights, one optimizer, one captured step."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from joma.common.float32 import float32_products
from joma.data import Batch
from joma.errors import JomaError
from joma.models import Transformer
from joma.optim import Optimizer
from joma.optim.stacked import as_stacked
from joma.optim.state import check_tensors, load_state, split_state
from joma.runs import Checkpoint
from joma.train.loop import LONGEST_CHUNK


class Network(Protocol):
    """E networks as one module, as `joma.models` has them.

    Attributes:
        seeds: Seed of each member.
        compute: Precision of activations and products, if not that of the parameters.
    """

    seeds: tuple[int, ...]
    compute: torch.dtype | None

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return names and parameters, with the member axis first."""
        ...

    def products(self) -> Iterable[str]:
        """Return the names of the parameters that activations are multiplied with."""
        ...

    def settings(self) -> dict[str, Any]:
        """Return what the networks are made of, for a checkpoint to be recognised by."""
        ...


N = TypeVar("N", bound=Network)

Batches = Callable[[int | Tensor], Any]
"""Returns the batch of a step; each member's part must depend on that member's seed alone."""

Loss = Callable[[N, Any, Tensor], Tensor]
"""Returns the loss of each member on a batch at a step, (E,).

The result has a graph to go back through, or its gradients are in the parameters already.
"""

PRECISIONS = ("float32", "float64", "tf32", "bfloat16")
"""Precisions of matrix products, in "bfloat16" of activations too; the last two need a GPU.

Parameters and the optimizer stay in float32 (float64 in "float64"); in "bfloat16" the gradients of
the blocks' matrices, and of small embeddings, are rounded to it before the optimizer reads them.
"""

_WARM_UPS = 3  # as many as torch advises before a capture


def classification_loss(model: Transformer, batch: Batch, step: Tensor) -> Tensor:
    """Return the cross-entropy of each member on its part of a batch, (E,)."""
    del step  # nothing is drawn
    return weighted_cross_entropy(model(batch.tokens, leading=batch.leading), batch)


class Ensemble(Generic[N]):
    """Networks, their optimizer and their data, and the step that moves all of them.

    A member follows the trajectory of the same network trained alone: the members share no
    operation but the launch. On the GPU the whole step, drawing the data included, is captured once
    as a CUDA graph and replayed, if the optimizer is made for it.

    Args:
        model: The networks.
        optimizer: Optimizer of the model's parameters: one of `joma.optim`, or any other with
            `step`, `zero_grad`, `state_dict` and `load_state_dict`. Members are independent if its
            rule is elementwise.
        batches: Function that returns the data of a step, given the step counter as a tensor.
        loss: What is minimised; the cross-entropy of the classes unless given.
        precision: One of `PRECISIONS`.
        restart_every: Steps after which the optimizer forgets its state, as where every epoch makes
            a new one.

    Attributes:
        step: Number of updates made so far.
    """

    stop_reason: str | None = None

    def __init__(
        self,
        model: N,
        optimizer: Optimizer,
        batches: Batches,
        *,
        loss: Loss[N] = classification_loss,
        precision: str = "float32",
        restart_every: int | None = None,
    ) -> None:
        if precision not in PRECISIONS:
            raise JomaError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
        first = next(parameter for _, parameter in model.named_parameters())
        dtype, self.device = first.dtype, first.device
        if precision in ("tf32", "bfloat16") and self.device.type != "cuda":
            raise JomaError(f"precision {precision} is for a CUDA device, not {self.device}")
        if (precision == "float64") != (dtype == torch.float64):
            raise JomaError(f"precision {precision} does not fit parameters in {dtype}")
        if restart_every is not None and restart_every < 1:
            raise JomaError(f"restart_every must be at least 1, got {restart_every}")
        self.model, self.optimizer, self.batches = model, optimizer, batches
        self.precision, self.restart_every = precision, restart_every
        self._loss = loss
        self._moves = as_stacked(optimizer, model.named_parameters())
        if precision == "bfloat16":
            self._moves.to_bfloat16_with_master_weights(model.products())
        self.members = len(model.seeds)
        self.step = 0
        self._counter = torch.zeros((), dtype=torch.int64, device=self.device)
        self._losses = torch.zeros(
            LONGEST_CHUNK, self.members, dtype=torch.float64, device=self.device
        )
        self._fetched = 0
        self._replay: Callable[[], None] | None = None

    def advance(self, steps: int) -> None:
        """Make `steps` steps; at most `LONGEST_CHUNK` between two calls of `losses`."""
        if self.step + steps - self._fetched > LONGEST_CHUNK:
            raise JomaError(
                f"steps must leave at most {LONGEST_CHUNK} losses to fetch, got {steps}"
            )
        with self.computing():
            captures = self.device.type == "cuda" and self._moves.capturable
            one = self._replay or self._capture() if captures else self._one_step
            for step in range(self.step, self.step + steps):
                if self.restart_every is not None and step and step % self.restart_every == 0:
                    self._moves.restart()
                one()
        self.step += steps

    def losses(self) -> tuple[range, Tensor]:
        """Return the steps since the last call and their losses before the update, (steps, E)."""
        steps = range(self._fetched, self.step)
        self._fetched = self.step
        return steps, self._losses.cpu()[[step % LONGEST_CHUNK for step in steps]]

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Compute products in the ensemble's precision; what was set before comes back."""
        coarse, half = self.precision in ("tf32", "bfloat16"), self.precision == "bfloat16"
        with float32_products("tf32" if coarse else "ieee"):
            try:
                self.model.compute = torch.bfloat16 if half else None
                yield
            finally:
                self.model.compute = None

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[N]:
        """Yield the networks to measure, without gradients, in float32 or tf32."""
        with self.computing(), self._moves.using_master_weights(), torch.no_grad():
            self.model.compute = None
            yield self.model

    def settings(self) -> dict[str, Any]:
        """Return what decides how the state continues, but for the data."""
        return {
            "seeds": list(self.model.seeds),
            **self.model.settings(),
            "precision": self.precision,
            **self._moves.settings(),
            "restart_every": self.restart_every,
        }

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors that decide what comes next; random numbers follow from the seeds."""
        yield "step", torch.tensor(self.step)
        yield "seeds", torch.tensor(self.model.seeds)
        for name, parameter in self._moves.master_weights().items():
            yield f"model.{name}", parameter
        for name, part in split_state(self.optimizer, self.model.named_parameters())[0].items():
            yield f"optimizer.{name}", part

    def about(self) -> dict[str, Any]:
        """Return the settings, and what the optimizer's state has besides tensors."""
        _, structure = split_state(self.optimizer, self.model.named_parameters())
        return self.settings() | ({} if structure is None else {"optimizer_state": structure})

    def check(self, checkpoint: Checkpoint) -> None:
        """Raise JomaError if a checkpoint is of other networks or has other settings."""
        given, saved = self.settings(), checkpoint.about
        if other := [name for name, value in given.items() if saved.get(name) != value]:
            wanted = " and ".join(f"{name} {saved.get(name)}" for name in other)
            got = " and ".join(f"{name} {given[name]}" for name in other)
            raise JomaError(
                f"ensemble must have {wanted}, as in {checkpoint.path}, from which the run "
                f"resumes, got {got}"
            )

    @torch.no_grad()
    def load_state(self, step: int, state: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        """Return to a state that `state` and `about` gave, of the same networks."""
        parts = {name: one for name, one in state.items() if name.startswith("optimizer.")}
        own = {name: one for name, one in self.state() if not name.startswith("optimizer.")}
        mine = {name: one for name, one in state.items() if name not in parts}
        check_tensors("state must be of these networks", mine, own)
        if not torch.equal(own["seeds"], mine["seeds"]):
            raise JomaError(
                f"state must be of seeds {own['seeds'].tolist()}, got {mine['seeds'].tolist()}"
            )
        for name, tensor in own.items():
            tensor.copy_(mine[name])
        parts = {name.removeprefix("optimizer."): one for name, one in parts.items()}
        load_state(self.optimizer, parts, about.get("optimizer_state"))
        self.step = self._fetched = step
        self._counter.fill_(step)

    def _one_step(self) -> None:
        loss_E = self._backward()
        self.optimizer.step()
        self._losses.index_copy_(0, (self._counter % LONGEST_CHUNK).view(1), loss_E.view(1, -1))
        self._counter += 1

    def _backward(self) -> Tensor:
        self.optimizer.zero_grad()
        loss_E = self._loss(self.model, self.batches(self._counter), self._counter)
        if loss_E.requires_grad:
            loss_E.sum().backward()  # each member's gradient is that of its own loss
        return loss_E.detach().double()

    def _capture(self) -> Callable[[], None]:
        """Capture a step without making one: the warm-up must not move a parameter."""
        current, other = torch.cuda.current_stream(), torch.cuda.Stream()
        other.wait_stream(current)
        with torch.cuda.stream(other):
            for _ in range(_WARM_UPS):
                self._backward()
            self._moves.warm_up()
        current.wait_stream(other)
        graph = torch.cuda.CUDAGraph()
        self.optimizer.zero_grad()
        with torch.cuda.graph(graph, stream=other):
            self._one_step()
        self._replay = graph.replay
        return graph.replay


def weighted_cross_entropy(outputs_EBC: Tensor, batch: Batch) -> Tensor:
    """Return the mean cross-entropy of each member's rows, as often as each counts: (E,)."""
    each = functional.cross_entropy(
        outputs_EBC.flatten(0, 1), batch.labels.flatten(), reduction="none"
    )
    each_EB = each.view_as(batch.labels)
    if batch.weights is None:
        return each_EB.mean(-1)
    return (each_EB * batch.weights.to(each_EB.dtype)).sum(-1)
