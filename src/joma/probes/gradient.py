"""Rank of gradients on a batch: would a few directions do (GaLore)?

GaLore keeps optimizer state for the top r directions of each weight's gradient. What the others
hold is lost to a step, so the share of the gradient's energy ‖G‖_F² in its top r directions says
how much a rank of r costs on this batch, and the stable rank ‖G‖_F²/‖G‖₂² how few there are.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from joma.common.checks import whole_number
from joma.errors import JomaError
from joma.probes.spectrum import Energy, StableRank, singular_values, stable_rank

RANKS = (1, 8, 32, 128)

Loss = Tensor | Callable[[], Tensor]


@dataclass(frozen=True, eq=False)
class GradientRank:
    """Statistics of the gradient of one weight on a batch.

    Attributes:
        name: of the parameter.
        shape: its two sizes.
        norm: Frobenius norm of the gradient.
        stable_rank: with its bound; 0 where the gradient is zero, or the loss does not reach the
            parameter.
        energy: by r, the share of ‖G‖_F² in the top r directions, with its bound; an r above the
            smaller size is left out, for there are no more directions.
    """

    name: str
    shape: tuple[int, int]
    norm: float
    stable_rank: StableRank
    energy: Mapping[int, Energy]


def gradient_rank(
    model: nn.Module,
    loss: Loss,
    parameters: Iterable[str] | None = None,
    *,
    ranks: Sequence[int] = RANKS,
    tolerance: float = 1e-3,
    seed: int = 0,
) -> dict[str, GradientRank]:
    """Stable rank and concentration of the gradient of a loss, for each weight matrix.

    Nothing of the model is changed: its `.grad` fields, buffers (running means of a batch norm)
    and modes are as before, and so is the state of the random generators that the loss may draw
    dropout from. The gradients of all the parameters asked for are in memory at once.

    Args:
        model: whose parameters.
        loss: what makes the loss, called once; or the loss itself, a number with its graph, which
            can still be sent backward afterwards.
        parameters: names as `named_parameters` has them; all matrices that train where None.
        ranks: which r to give the energy of.
        tolerance: of the estimates, relative.
        seed: decides the random start of the estimates.

    Raises:
        ValueError: also where a gradient is not finite.
    """
    ranks = tuple(whole_number("ranks", rank, 1) for rank in ranks)
    chosen = _chosen(model, parameters)
    gradients = _gradients(model, loss, list(chosen.values()))
    found = {}
    for (name, parameter), gradient in zip(chosen.items(), gradients, strict=True):
        matrix = torch.zeros_like(parameter) if gradient is None else gradient
        found[name] = measured(name, matrix, ranks, tolerance, seed)
    return found


def measured(
    name: str, gradient: Tensor, ranks: Iterable[int], tolerance: float, seed: int
) -> GradientRank:
    """`gradient_rank` of one gradient that is there already."""
    matrix = gradient.detach()
    matrix = matrix.to_dense() if matrix.layout != torch.strided else matrix
    if not bool(matrix.isfinite().all()):
        raise JomaError(f"the gradient of {name} must be finite, got NaN or infinity")
    rows, columns = matrix.shape
    fitting = [rank for rank in ranks if rank <= min(rows, columns)]
    energy, stable = {}, None
    if fitting:
        top = singular_values(matrix, max(fitting), tolerance=tolerance, seed=seed)
        energy = {rank: top.energy(rank) for rank in fitting}
        stable = top.stable_rank() if top.certain else None
    stable = stable or stable_rank(matrix, tolerance=tolerance, seed=seed)
    return GradientRank(name, (rows, columns), stable.frobenius, stable, energy)


def _chosen(model: nn.Module, names: Iterable[str] | None) -> dict[str, nn.Parameter]:
    there = dict(model.named_parameters())
    matrices = {
        name: parameter
        for name, parameter in there.items()
        if parameter.ndim == 2 and parameter.numel() and parameter.requires_grad
    }
    if names is None:
        if not matrices:
            raise JomaError("model must have a matrix that trains, got none")
        return matrices
    names = [names] if isinstance(names, str) else list(names)
    for name in names:
        if name not in there:
            some = ", ".join(list(matrices)[:5])
            raise JomaError(f"parameters must be among the model's ({some} …), got {name!r}")
        if name not in matrices:
            raise JomaError(
                f"parameters must be matrices that train, got {name!r} of shape "
                f"{tuple(there[name].shape)}"
                + ("" if there[name].requires_grad else ", which does not")
            )
    if not names:
        raise JomaError("parameters must name at least one, got none")
    return {name: matrices[name] for name in names}


def _gradients(
    model: nn.Module, loss: Loss, parameters: list[nn.Parameter]
) -> Sequence[Tensor | None]:
    if isinstance(loss, Tensor):
        return _differentiated(loss, parameters, keep_graph=True)
    with _as_found(model), torch.enable_grad():
        value = loss()
        if not isinstance(value, Tensor):
            raise JomaError(f"loss must give a torch.Tensor, got a {type(value).__name__}")
        return _differentiated(value, parameters, keep_graph=False)


def _differentiated(
    loss: Tensor, parameters: list[nn.Parameter], keep_graph: bool
) -> Sequence[Tensor | None]:
    if loss.numel() != 1 or not loss.requires_grad:
        raise JomaError(
            "loss must be one number that depends on the model's parameters, got shape "
            f"{tuple(loss.shape)}{'' if loss.requires_grad else ' without a graph'}"
        )
    return torch.autograd.grad(loss.sum(), parameters, retain_graph=keep_graph, allow_unused=True)


@contextlib.contextmanager
def _as_found(model: nn.Module) -> Iterator[None]:
    """Buffers, modes and random generators are put back when the block ends."""
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    modes = {module: module.training for module in model.modules()}
    devices = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
    with torch.random.fork_rng([device.index for device in devices]):
        try:
            yield
        finally:
            with torch.no_grad():
                for name, buffer in model.named_buffers():
                    if name in buffers:
                        buffer.copy_(buffers[name])
            for module, training in modes.items():
                module.training = training
