"""The small Llama and its text, the optimizer of each method, and the training of one network."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from joma.common.float32 import float32_products
from joma.common.quiet import quietly
from joma.data import BYTES, corpus, encoded
from joma.errors import JomaError
from joma.experiments._experiment import Request
from joma.experiments._frame import groups_done, member_seeds
from joma.experiments.galore import TUNING_MEMBER, GaLoreNetwork, GaloreSize
from joma.optim import GaLoreAdamW
from joma.runs import Run

WARM_UP = 0.1
"""Share of the steps in which the learning rate rises."""
LAST_RATE = 0.1
"""The learning rate at the end, as a share of the highest."""


@dataclass(frozen=True, eq=False)
class ByteText:
    """The bytes of a text.

    Attributes:
        train: Those to learn from.
        valid: The sequences to measure on, each with the byte that follows, (N, window + 1).
        window: Bytes of a sequence.
    """

    train: Tensor
    valid: Tensor
    window: int

    def batch(self, seed: int, step: int, count: int) -> Tensor:
        """Return the sequences of a step, each with the byte that follows, (count, window + 1)."""
        random = np.random.default_rng((seed, step))
        starts = torch.from_numpy(random.integers(0, len(self.train) - self.window, count))
        device = self.train.device
        within = torch.arange(self.window + 1, device=device)
        return self.train[starts.to(device)[:, None] + within].long()


def load_text(size: GaloreSize, device: str) -> ByteText:
    """Read the text of a size.

    Raises:
        JomaError: It is not there, or is too short.
    """
    source, length = corpus(size.corpus), size.window + 1
    train, valid = (
        torch.from_numpy(np.array(encoded(source, BYTES, split).tokens, dtype=np.uint8))
        for split in ("train", "valid")
    )
    if len(train) <= length or len(valid) < length:
        raise JomaError(f"corpus {size.corpus} must have at least {length + 1} bytes in each split")
    count = min(size.valid_windows, len(valid) // length)
    starts = torch.linspace(0, len(valid) - length, count).long()  # spread over the whole split
    windows = valid[starts[:, None] + torch.arange(length)]
    return ByteText(train.to(device), windows.long().to(device), size.window)


def make_model(size: GaloreSize, seed: int, device: str) -> nn.Module:
    """Return an untrained Llama over bytes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=BYTES.size,
        hidden_size=size.width,
        intermediate_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        max_position_embeddings=size.window,
        tie_word_embeddings=False,
        use_cache=False,
    )
    with quietly(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = LlamaForCausalLM(config)
    return model.to(device)


def loss_of(model: nn.Module, sequences: Tensor) -> Tensor:
    """Return the mean cross-entropy of the bytes that follow, in nats."""
    logits = model(input_ids=sequences[:, :-1]).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), sequences[:, 1:].flatten())


@torch.no_grad()
def validation_loss(model: nn.Module, text: ByteText, batch: int) -> float:
    """Return the loss on the sequences to measure on."""
    parts = text.valid.split(batch)
    losses = [loss_of(model, part).double() * len(part) for part in parts]
    return float(torch.stack(losses).sum()) / len(text.valid)


def matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trained matrices of the layers by name: those that GaLore projects, or LoRA's."""
    inside: Any = model
    return {
        name: one
        for name, one in inside.model.layers.named_parameters()
        if one.ndim == 2 and one.requires_grad
    }


class LoRALinear(nn.Module):
    """A linear layer W₀ + BA, of which A (r, n) and B (m, r) are trained and W₀ is not.

    B starts at zero: the layer begins as the one it replaces (Hu et al., 2021).

    Args:
        base: The layer with W₀, which is frozen.
        rank: r.
        random: Draws A.
    """

    def __init__(self, base: nn.Linear, rank: int, random: torch.Generator) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        weight = base.weight
        bound = math.sqrt(3 / base.in_features)
        start = torch.rand(rank, base.in_features, generator=random) * 2 - 1
        self.down = nn.Parameter((start * bound).to(weight.device, weight.dtype))
        self.up = nn.Parameter(weight.new_zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        """Return (W₀ + BA)x, without forming BA."""
        return self.base(x) + nn.functional.linear(nn.functional.linear(x, self.down), self.up)


def add_lora(model: nn.Module, rank: int, seed: int) -> None:
    """Replace every linear layer of the blocks by one with LoRA, from the weights it has now."""
    random = torch.Generator().manual_seed(seed)
    inside: Any = model
    for parent in list(inside.model.layers.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, LoRALinear(child, rank, random))


def make_optimizer(model: nn.Module, network: GaLoreNetwork, device: str) -> torch.optim.Optimizer:
    """Return the optimizer of a network's method; that of AdamW for LoRA too."""
    if network.method in ("full", "lora"):
        inside = list(matrices(model).values())
        taken = {id(one) for one in inside}
        rest = [one for one in model.parameters() if one.requires_grad and id(one) not in taken]
        return torch.optim.AdamW(
            [{"params": inside, "share": network.rate.share}, {"params": rest}],
            lr=network.rate.rate,
            weight_decay=0.0,
            fused=device == "cuda",
        )
    return GaLoreAdamW(
        model,
        network.rate.rate,
        rank=network.rank,
        gap=network.gap,
        scale=network.rate.share,
        moments=network.moments,  # type: ignore[arg-type]
        projection="svd" if network.method == "svd" else "power",
        stagger=network.method != "svd",
        seed=network.member,
        verbose=False,
    )


def schedule(done: float) -> float:
    """Return the learning rate as a share of the highest: a linear rise, then half a cosine.

    Args:
        done: Share of the training that is done.
    """
    if done < WARM_UP:
        return done / WARM_UP
    along = (done - WARM_UP) / (1 - WARM_UP)
    return LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * along)) / 2


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of an optimizer's state, without single numbers such as step counts."""
    return sum(
        one.numel() * one.element_size()
        for state in optimizer.state.values()
        for one in state.values()
        if isinstance(one, Tensor) and one.ndim
    )


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


def _fast_products(device: str) -> AbstractContextManager[None]:
    """Let a GPU multiply float32 matrices in TF32, as is usual, within the block."""
    return float32_products("tf32") if device == "cuda" else nullcontext()


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
