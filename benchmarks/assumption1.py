"""Assumption 1 of JoMA in trained networks: how far E[g x] drifts while the loss falls.

    python -m benchmarks.assumption1

Two kinds of network, three seeds each. The blocks of Fig. 2 (cross-entropy, nodes are class
scores), by `joma.theory.stationarity`; and a Transformer of two layers that classifies a latent
tree by its leaves, all weights trained by full-batch gradient descent, in which x is the input of
each MLP and g the gradient of the loss by its hidden nodes. Printed: the share of the loss's whole
fall at which the drift ‖E[g x](t) − E[g x](0)‖/‖E[g x](0)‖ first exceeds 0.1, 0.5 and 1, the
largest and last drift, and the cosine of the last E[g x] with the first.
"""

import numpy as np
import torch
from torch import nn

from joma.experiments.theory_figures.linear_block import TITLES, train
from joma.theory import block, stationarity
from joma.theory.hblt import Tree

SEEDS = 3
STEPS, EVERY, RATE, SAMPLES, WIDTH = 400, 4, 0.05, 512, 32
LEVELS = (0.1, 0.5, 1.0)


class Layer(nn.Module):
    """Attention and an MLP of ReLU nodes, with residual connections."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 1, batch_first=True)
        self.lower, self.upper = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.seen: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Apply both; keep the MLP's input and its hidden nodes."""
        x_BTD = x_BTD + self.attention(x_BTD, x_BTD, x_BTD, need_weights=False)[0]
        hidden_BTK = torch.relu(self.lower(x_BTD))
        hidden_BTK.retain_grad()
        self.seen = x_BTD.detach(), hidden_BTK
        return x_BTD + self.upper(hidden_BTK)


def train_transformer(seed: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """Train on a tree; the loss and, for each layer, E[g x] every few steps."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    switched = np.where(np.arange(4)[:, None] == np.arange(4), 0.05, 0.95)
    tree = Tree.regular(3, 2, 0.9, np.full(4, 0.25), switched)
    labels, levels = tree.sample(SAMPLES, rng)
    leaves = torch.as_tensor(levels[-1].astype(np.int64))
    tokens = leaves + 2 * torch.arange(leaves.shape[1])
    target = torch.as_tensor(labels)
    embed = nn.Embedding(2 * leaves.shape[1], WIDTH)
    layers, head = nn.ModuleList([Layer(), Layer()]), nn.Linear(WIDTH, 4)
    optimizer = torch.optim.SGD(
        [*embed.parameters(), *layers.parameters(), *head.parameters()], lr=RATE
    )
    losses: list[float] = []
    means: list[list[np.ndarray]] = [[], []]
    for step in range(STEPS + 1):
        x_BTD = embed(tokens)
        for layer in layers:
            x_BTD = layer(x_BTD)
        loss = nn.functional.cross_entropy(head(x_BTD.mean(dim=1)), target)
        optimizer.zero_grad()
        loss.backward()
        if step % EVERY == 0:
            losses.append(float(loss.detach()))
            for kept, layer in zip(means, layers, strict=True):
                assert isinstance(layer, Layer)
                assert layer.seen is not None
                x, hidden = layer.seen
                assert hidden.grad is not None
                kept.append(-torch.einsum("btd,btk->dk", x, hidden.grad).numpy())
        optimizer.step()
    return np.array(losses), [np.stack(kept) for kept in means]


def describe(name: str, losses: np.ndarray, means: np.ndarray) -> str:
    """One row: where the drift passes each level, how large it gets, and the direction it keeps."""
    sizes = np.linalg.norm(means.reshape(len(means), -1), axis=1)
    away = np.linalg.norm((means - means[0]).reshape(len(means), -1), axis=1) / sizes[0]
    fallen = (losses[0] - losses) / (losses[0] - losses.min())
    passed = [
        f"{fallen[np.argmax(away > level)]:.0%}" if np.any(away > level) else "never"
        for level in LEVELS
    ]
    cosine = float(np.sum(means[-1] * means[0]) / (sizes[-1] * sizes[0]))
    return (
        f"| {name} | {' | '.join(passed)} | {away.max():.2f} | {away[-1]:.2f} | {cosine:.2f} "
        f"| {losses[0]:.2f} → {losses[-1]:.2f} |"
    )


def main() -> None:
    """Print the table."""
    print("| network | 0.1 at | 0.5 at | 1 at | largest | last | cosine | loss |")
    print("|---|---|---|---|---|---|---|---|")
    for kind in TITLES:
        for seed in range(SEEDS):
            path = train(kind, seed).path
            states = [
                block.State(v, z[None], bias)
                for v, z, bias in zip(path.v, path.z, path.bias, strict=True)
            ]
            losses = [-block.objective(path.block, path.samples, state) for state in states]
            means = [
                stationarity.gradient_means(path.block, path.samples, state) for state in states
            ]
            print(describe(f"Fig. 2, {kind}, seed {seed}", np.array(losses), np.stack(means)))
    for seed in range(SEEDS):
        losses, per_layer = train_transformer(seed)
        for number, means in enumerate(per_layer):
            print(describe(f"Transformer, layer {number}, seed {seed}", losses, means))


if __name__ == "__main__":
    main()
