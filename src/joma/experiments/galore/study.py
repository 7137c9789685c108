"""What is measured of a network's gradients and weights while it learns in full rank."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from joma.experiments.galore.setting import GaloreSize
from joma.runs import Run


class SubspaceStudy:
    """Gradient rank, captured energy of old bases, and weight subspaces, logged by matrix.

    At every studied step t, the metrics of the run get `gradient_stable_rank`, ‖G‖²_F / ‖G‖², and
    `gradient_captured`, the share of ‖G‖²_F in its own r leading singular directions. For each lag
    k they get `captured_after_K` at step t: the share of ‖G_{t+k}‖²_F in the directions of G_t. At
    the end they get `weight_overlap` and `weight_stable_rank` at every studied step: how much of
    the r leading directions of W_t − W_0 lies in those of the last W − W_0. Directions are those of
    the shorter side.

    With gradients averaged over many batches, they also get `averaged_stable_rank`, that of such a
    gradient, and `gradient_noise`, the share of ‖G‖²_F of a single batch that is noise.

    Args:
        run: Run of the network.
        size: Size of the experiment; says when to measure, and r.
        matrices: The matrices by name.
        averaged: Returns averaged gradients by name, none where not wanted, and over how many
            batches, given the step.
    """

    def __init__(
        self,
        run: Run,
        size: GaloreSize,
        matrices: Mapping[str, nn.Parameter],
        averaged: Callable[[int], tuple[Mapping[str, Tensor], int]] = lambda _: ({}, 0),
    ) -> None:
        self.run, self.size, self.matrices, self.averaged = run, size, matrices, averaged
        self._bases: dict[int, dict[str, Tensor]] = {}
        self._kept: dict[int, dict[str, Tensor]] = {}
        self._start = {name: one.detach().cpu().clone() for name, one in matrices.items()}

    @torch.no_grad()
    def before_step(self, step: int) -> None:
        """Measure before the parameters move in a step, with the gradients there."""
        due = [(step - lag, lag) for lag in self.size.lags if step - lag in self._bases]
        studied = step in self.size.studied_steps
        if not due and not studied:
            return
        if studied:
            self._keep(step)
        means, count = self.averaged(step) if studied else ({}, 0)
        for name, gradient in means.items():
            _, squares = leading_directions(gradient, self.size.rank)
            self._log(step, "averaged_stable_rank", squares.sum() / squares[0], name)
            own = self.matrices[name].grad
            assert own is not None
            noise = noise_share(own, gradient, count)
            self._log(step, "gradient_noise", noise, name)
        new: dict[str, Tensor] = {}
        for name, one in self.matrices.items():
            assert one.grad is not None
            gradient = one.grad.float()
            for begun, lag in due:
                old = captured_share(gradient, self._bases[begun][name])
                self._log(begun, f"captured_after_{lag}", old, name)
            if studied:
                new[name], squares = leading_directions(gradient, self.size.rank)
                self._log(step, "gradient_stable_rank", squares.sum() / squares[0], name)
                own = captured_share(gradient, new[name])
                self._log(step, "gradient_captured", own, name)
        if studied:
            self._bases[step] = new
        last = max(self.size.lags, default=0)
        self._bases = {begun: one for begun, one in self._bases.items() if step - begun < last}

    @torch.no_grad()
    def at_end(self, step: int) -> None:
        """Compare the weights of every studied step with the last ones."""
        self._keep(step)
        device = next(iter(self.matrices.values())).device
        for name, start in self._start.items():
            # Seven matrices a layer: one at a time, so that the device keeps one alone.
            learned = {at: (one[name] - start).to(device) for at, one in self._kept.items() if at}
            final, _ = leading_directions(learned[step], self.size.rank)
            for at, moved in learned.items():
                basis, squares = leading_directions(moved, self.size.rank)
                overlap = (final.mT @ basis).square().sum() / basis.shape[1]
                self._log(at, "weight_overlap", overlap, name)
                stable = squares.sum() / squares[0]
                self._log(at, "weight_stable_rank", stable, name)

    def _keep(self, step: int) -> None:
        self._kept[step] = {name: one.detach().cpu().clone() for name, one in self.matrices.items()}

    def _log(self, step: int, name: str, value: Tensor, module: str) -> None:
        layer = int(module.split(".")[0])
        self.run.metrics.append(step, name, float(value), module=module, layer=layer)


def leading_directions(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return leading singular directions of the shorter side as columns, and all squared values.

    They are those of the smaller Gram matrix in float64, which is far faster than an SVD on a GPU
    and exact enough for shares of energy.
    """
    wide = matrix.double() if matrix.shape[0] <= matrix.shape[1] else matrix.double().mT
    squares, directions = torch.linalg.eigh(wide @ wide.mT)  # in rising order
    return directions[:, -rank:].to(matrix.dtype), squares.flip(0)


def noise_share(single: Tensor, averaged: Tensor, count: int) -> Tensor:
    """Return an estimate of E‖N‖² / E‖G + N‖², the share of noise in a single batch's gradient.

    For batches that are independent, E‖single − averaged‖² is (1 + 1/count) E‖N‖².

    Args:
        single: Gradient of one batch, which is not among those averaged.
        averaged: Mean of the gradients of other batches.
        count: How many.
    """
    noise = (single - averaged).square().sum() * count / (count + 1)
    return noise / single.square().sum().clamp(min=1e-30)


def captured_share(gradient: Tensor, basis: Tensor) -> Tensor:
    """Return the share of ‖G‖² in a subspace of the shorter side, 0 to 1."""
    rows, columns = gradient.shape
    inside = basis.mT @ gradient if rows <= columns else gradient @ basis
    return inside.square().sum() / gradient.square().sum().clamp(min=1e-30)
