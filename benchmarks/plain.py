"""The network and loop of Table 1 as one would plainly write them: one network, sample by sample.

Shares no code with the package: it is the reference of the tests and the other side of the
benchmarks.
"""

import math
import random
import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional


class PlainBlock(nn.Module):
    """Causal single-head attention and MLP, each followed by a layer norm."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.norm_attention = nn.LayerNorm(width)
        self.lower = nn.Linear(width, hidden)
        self.upper = nn.Linear(hidden, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.nodes: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Maps (batch, length, width) to the same shape."""
        scores = self.query(x) @ self.key(x).transpose(1, 2) / math.sqrt(x.shape[-1])
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        attention = torch.softmax(scores.masked_fill(future, float("-inf")), -1)
        x = self.norm_attention(x + attention @ self.value(x))
        self.nodes = torch.relu(self.lower(x))
        return self.norm_mlp(x + self.upper(self.nodes))


class PlainTransformer(nn.Module):
    """Embedding, blocks, and a classifier on the last position."""

    def __init__(
        self, vocabulary: int, classes: int, layers: int = 3, width: int = 1024, hidden: int = 4096
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(PlainBlock(width, hidden) for _ in range(layers))
        self.output = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps (batch, length) tokens to (batch, classes)."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.output(x[:, -1])


class PlainHierarchy:
    """Latents as random sets of lower ones; draws one sample at a time."""

    def __init__(
        self, classes: int, children: int, latents: tuple[int, ...], seed: int, length: int = 30
    ) -> None:
        self.random = random.Random(seed)
        self.length = length
        self.levels: list[list[list[int]]] = []
        below = list(range(1, 100))
        for count in (*latents, classes):
            sets: list[list[int]] = []
            while len(sets) < count:
                candidate = sorted(self.random.sample(below, children))
                if candidate not in sets:
                    sets.append(candidate)
            self.levels.append(sets)
            below = list(range(count))

    def sample(self) -> tuple[list[int], int]:
        """Draws a class and expands it from the top down."""
        label = self.random.randrange(len(self.levels[-1]))
        nodes = [label]
        for level in reversed(self.levels):
            nodes = sorted({child for node in nodes for child in level[node]})
        return [0] * (self.length - len(nodes)) + nodes, label

    def batches(self, size: int, device: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of samples, without end."""
        while True:
            samples = [self.sample() for _ in range(size)]
            tokens = torch.tensor([tokens for tokens, _ in samples], device=device)
            yield tokens, torch.tensor([label for _, label in samples], device=device)


def train(
    classes: int,
    children: int,
    latents: tuple[int, int],
    *,
    steps: int,
    hidden: int,
    width: int = 1024,
    device: str,
    learning_rate: float = 1e-5,
    warm_up: int = 20,
) -> float:
    """Trains one network; seconds for each step after the first `warm_up`."""
    torch.manual_seed(0)
    model = PlainTransformer(100, classes, width=width, hidden=hidden).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate, weight_decay=1e-4)
    batches = PlainHierarchy(classes, children, latents, seed=0).batches(128, device)
    start = 0.0
    for step in range(warm_up + steps):
        if step == warm_up:
            _wait(device)
            start = time.perf_counter()
        tokens, labels = next(batches)
        loss = functional.cross_entropy(model(tokens), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()  # what a loop that prints its loss does
    _wait(device)
    return (time.perf_counter() - start) / steps


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
