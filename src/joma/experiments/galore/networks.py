"""The small Llama, the text it reads, LoRA, and the optimizer of each method."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from joma.common.quiet import quietly
from joma.data import BYTES, corpus, encoded
from joma.errors import JomaError
from joma.experiments.galore.setting import GaLoreNetwork, GaloreSize
from joma.optim import GaLoreAdamW

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
