"""Small models that learn, for the monitor to watch."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from joma.runs import Run

VOCABULARY, LENGTH, BATCH = 50, 12, 4


class Encoder(nn.Module):
    """torch's own encoder layers, causal, with dropout and a buffer that training moves."""

    def __init__(
        self, layers: int = 2, width: int = 16, heads: int = 2, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        layer = nn.TransformerEncoderLayer(width, heads, 32, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm: nn.Module = nn.BatchNorm1d(width)
        self.output = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        x = self.encoder(self.embedding(tokens), mask=mask, is_causal=True)
        return self.output(self.norm(x.flatten(0, 1)).view_as(x))


def encoder(seed: int = 0, **options: Any) -> Encoder:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Encoder(**options)


def hugging_face(kind: str = "gpt_neox", seed: int = 0, **options: Any) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "intermediate_size": 32, "max_position_embeddings": 32}
    config = AutoConfig.for_model(kind, **sizes, **options)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config)


def batches(seed: int = 1):
    """Without end, from a generator of its own."""
    dice = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randint(VOCABULARY, (BATCH, LENGTH), generator=dice)


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def train(
    model: nn.Module,
    steps: int,
    *,
    after_step: Callable[[Tensor], object] = lambda loss: None,
    call: Callable[[nn.Module, Tensor], Tensor] | None = None,
    accumulate: int = 1,
    rate: float = 1e-3,
) -> tuple[list[float], dict[str, Tensor], Tensor]:
    """Losses, final state, and what the global generator says next."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    feed = batches()
    model.train()
    torch.manual_seed(7)
    losses = []
    for _ in range(steps):
        total = torch.zeros(())
        for _ in range(accumulate):
            tokens = next(feed)
            loss = call(model, tokens) if call else loss_of(model(tokens), tokens)
            (loss / accumulate).backward()
            total = total + loss.detach() / accumulate
        optimizer.step()
        after_step(total)
        optimizer.zero_grad()
        losses.append(float(total))
    return losses, {k: v.clone() for k, v in model.state_dict().items()}, torch.rand(3)


def of_run(run: Run, name: str, **where: Any) -> tuple[list[int], list[float]]:
    columns = run.metrics.read(name)
    chosen = np.ones(len(columns["step"]), dtype=bool)
    for key, value in where.items():
        chosen &= columns[key] == value
    return columns["step"][chosen].tolist(), columns["value"][chosen].tolist()
