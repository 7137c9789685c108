"""Training networks one by one, and what is measured of their gradients and weights."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn

from joma.experiments._experiment import Request
from joma.experiments._frame import groups_done, member_seeds
from joma.experiments.galore.networks import (
    add_lora,
    load_text,
    loss_of,
    make_model,
    make_optimizer,
    matrices,
    schedule,
    state_bytes,
    validation_loss,
)
from joma.experiments.galore.setting import TUNING_MEMBER, GaLoreNetwork, GaloreSize
from joma.runs import Run

OptimizerMaker = Callable[[nn.Module, GaLoreNetwork, str], torch.optim.Optimizer]


def train_networks(
    run: Run, networks: Sequence[GaLoreNetwork], size: GaloreSize, request: Request, what: str
) -> None:
    """Train the networks that are not done, each in `groups/NAME` of the run's folder.

    One that was stopped starts over.

    Args:
        run: Run of the experiment.
        networks: The networks.
        size: Size of the experiment.
        request: What was asked of the experiment.
        what: What the progress is called.
    """
    ended = groups_done(run, [one.name for one in networks])
    left = [one for one in networks if one.name not in ended]
    for done, network in enumerate(left):

        def report(step: int, steps: int, done: int = done) -> None:
            request.progress(f"train {what}", done * steps + step, len(left) * steps)

        train_network(run.path / "groups" / network.name, network, size, request, report)


def train_network(
    folder: Path,
    network: GaLoreNetwork,
    size: GaloreSize,
    request: Request,
    report: Callable[[int, int], None] = lambda *_: None,
    make: OptimizerMaker = make_optimizer,
) -> None:
    """Train one network and write what became of it to its run folder.

    The metrics have `loss` of every step, `validation_loss` by the number of steps made, and of
    networks in full rank what `SubspaceStudy` measures; `outcome.json` has the rest.

    Args:
        folder: Run folder of the network.
        network: The network.
        size: Size of the experiment.
        request: What was asked of the experiment.
        report: Is called with the number of steps made and of all steps.
        make: Makes the optimizer of the model, the network and the device.
    """
    device = request.device
    config = {**size.training, "network": asdict(network), "seed": request.seed}
    run = Run.resume("galore-network", config, out=folder, device=device)
    run.metrics.rewind(-1)
    text = load_text(size, device)
    # Networks with the same number have the same seed, whatever their method.
    seed = member_seeds("galore", request.seed, network.member + 1)[network.member]
    model = make_model(size, seed, device)
    parameters = sum(one.numel() for one in model.parameters())
    now = network
    if network.full_rate is not None:
        now = GaLoreNetwork("full", network.full_rate, network.member)
    elif network.method == "lora":
        add_lora(model, network.rank, seed)
    optimizer = make(model, now, device)
    study = None
    if network.method == "full" and network.member != TUNING_MEMBER:
        study = SubspaceStudy(run, size, matrices(model))
    losses, times, final = list[Tensor](), list[float](), float("nan")
    for step in range(size.steps + 1):
        if step in size.measured_steps:
            with _fast_products(device):
                final = validation_loss(model, text, size.batch)
            run.metrics.append(step, "validation_loss", final)
            report(step, size.steps)
        if step == size.steps:
            break
        if network.switch and step == network.switch:
            add_lora(model, network.rank, seed)
            now, optimizer = network, make(model, network, device)
        begun = _now(device)
        rate = now.rate.rate * schedule((step + 1) / size.steps)
        if network.switch and step >= network.switch:  # rises again
            rate *= min(1.0, (step + 1 - network.switch) / max(1.0, 0.02 * size.steps))
        for group in optimizer.param_groups:
            group["lr"] = rate * group.get("share", 1.0)
        with _fast_products(device):
            loss = loss_of(model, text.batch(seed, step, size.batch))
            loss.backward()
        losses.append(loss.detach())
        if study is not None:
            paused = _now(device)
            study.before_step(step)
            begun += _now(device) - paused
        optimizer.step()
        optimizer.zero_grad()
        times.append(_now(device) - begun)
    if study is not None:
        study.at_end(size.steps)
    for step, loss in enumerate(losses):
        run.metrics.append(step, "loss", float(loss))
    run.metrics.flush()
    outcome = {
        "status": "done",
        "device": device,
        "network": network.name,
        "validation_loss": final,
        "steps": size.steps,
        "parameters": parameters,
        "state_bytes": state_bytes(optimizer),
        "seconds": sum(times) / len(times),
        "slowest": max(times[len(times) // 10 :]),  # the first steps also load and compile
    }
    run.write_json("outcome", outcome)


def _now(device: str) -> float:
    """Return the time at which the device has done all it was asked."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


@contextlib.contextmanager
def _fast_products(device: str) -> Iterator[None]:
    """Let a GPU multiply float32 matrices in TF32, as is usual, within the block."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if device == "cuda" else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class SubspaceStudy:
    """Gradient rank, captured energy of old bases, and weight subspaces, logged by matrix.

    At every studied step t, the metrics of the run get `gradient_stable_rank`, ‖G‖²_F / ‖G‖², and
    `gradient_captured`, the share of ‖G‖²_F in its own r leading singular directions. For each lag
    k they get `captured_after_K` at step t: the share of ‖G_{t+k}‖²_F in the directions of G_t. At
    the end they get `weight_overlap` and `weight_stable_rank` at every studied step: how much of
    the r leading directions of W_t − W_0 lies in those of the last W − W_0. Directions are those of
    the shorter side.

    Args:
        run: Run of the network.
        size: Size of the experiment; says when to measure, and r.
        matrices: The matrices by name.
    """

    def __init__(self, run: Run, size: GaloreSize, matrices: Mapping[str, nn.Parameter]) -> None:
        self.run, self.size, self.matrices = run, size, matrices
        self._bases: dict[int, dict[str, Tensor]] = {}
        self._kept: dict[int, dict[str, Tensor]] = {}
        self._start = self._weights()

    def _weights(self) -> dict[str, Tensor]:
        return {name: one.detach().cpu().clone() for name, one in self.matrices.items()}

    @torch.no_grad()
    def before_step(self, step: int) -> None:
        """Measure before the parameters move in a step, with the gradients there."""
        studied = step in self.size.studied_steps
        new: dict[str, Tensor] = {}
        for name, one in self.matrices.items():
            assert one.grad is not None
            gradient = one.grad.float()
            for lag in self.size.lags:
                if step - lag in self._bases:
                    old = captured_share(gradient, self._bases[step - lag][name])
                    self._log(step - lag, f"captured_after_{lag}", old, name)
            if studied:
                new[name], squares = leading_directions(gradient, self.size.rank)
                self._log(step, "gradient_stable_rank", squares.sum() / squares[0], name)
                own = captured_share(gradient, new[name])
                self._log(step, "gradient_captured", own, name)
        if studied:
            self._bases[step], self._kept[step] = new, self._weights()
        last = max(self.size.lags, default=0)
        self._bases = {begun: one for begun, one in self._bases.items() if step - begun < last}

    @torch.no_grad()
    def at_end(self, step: int) -> None:
        """Compare the weights of every studied step with the last ones."""
        self._kept[step] = self._weights()
        device = next(iter(self.matrices.values())).device
        for name, start in self._start.items():
            # Seven matrices a layer: one at a time, so that the device keeps one alone.
            learned = {at: (one[name] - start).to(device) for at, one in self._kept.items() if at}
            final, _ = leading_directions(learned[step], self.size.rank)
            for at, moved in learned.items():
                basis, squares = leading_directions(moved, self.size.rank)
                overlap = (final.mT @ basis).square().sum() / basis.shape[1]
                self._log(at, "weight_overlap", overlap, name)
                self._log(at, "weight_stable_rank", squares.sum() / squares[0], name)

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


def captured_share(gradient: Tensor, basis: Tensor) -> Tensor:
    """Return the share of ‖G‖² in a subspace of the shorter side, 0 to 1."""
    rows, columns = gradient.shape
    inside = basis.mT @ gradient if rows <= columns else gradient @ basis
    return inside.square().sum() / gradient.square().sum().clamp(min=1e-30)
