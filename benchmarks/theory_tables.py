"""Two tables of the theory pages.

    python -m benchmarks.theory_tables

How far a token's law drifts with random embeddings (docs/theory/embeddings.md), and how often
Theorem 1 of the CDAG note has the wrong sign with a network's own weights (docs/theory/cdag.md).
"""

import numpy as np

from joma.theory import embeddings, invariants
from joma.theory.block import Block, Samples, State, simulate
from joma.theory.cdag import CDAG, LINEAR, TANH, correlation_bound, edge_correlations
from joma.theory.hblt import Tree

SEEDS = 30
STEPS = (0, 10, 20, 70, 100)
"""Steps between two measurements."""


def print_drifts() -> None:
    """Exp attention, tanh, 40 samples, 3 nodes, t = 1; one query orthogonal to all tokens."""
    print("| tokens, dimensions, seed | ε | motion of z | drift of a token's law | of the whole |")
    print("|---|---|---|---|---|")
    for tokens, dimension in ((9, 5), (9, 60), (100, 60), (100, 400)):
        for seed in range(2):
            rng = np.random.default_rng(seed)
            columns = np.zeros((dimension + 1, tokens + 1))
            columns[:-1, :-1] = embeddings.almost_orthogonal(tokens, dimension, rng)
            columns[-1, -1] = 1
            x = rng.dirichlet(np.ones(tokens), size=40)
            samples = Samples(x, gradient=rng.normal(size=(40, 3)))
            w, z = 0.3 * rng.normal(size=(dimension + 1, 3)), 0.3 * rng.normal(size=(1, tokens))
            start = State(columns[:, :tokens].T @ w, z, columns[:, tokens:].T @ w)
            block = Block("exp", "tanh", embeddings=columns)
            path = simulate(block, samples, [0.0, 1.0], initial=start)
            law = invariants.conserved_pointwise(block, path.v, path.z)
            whole = invariants.conserved_total(block, path.v, path.z)
            print(
                f"| {tokens}, {dimension}, {seed} | {embeddings.coherence(columns[:, :-1]):.2f} "
                f"| {np.abs(path.z[1] - path.z[0]).max():.4f} "
                f"| {np.abs(law[1] - law[0]).max():.4f} | {np.abs(whole[1] - whole[0]).max():.1e} |"
            )


def print_edges() -> None:
    """Networks trained on trees: pairs with θ₁ + θ₂ + θ₃ < π/2, and how many have a wrong sign."""
    counts = np.zeros((len(STEPS), 3))
    for seed in range(SEEDS):
        rng = np.random.default_rng(seed)
        tree = Tree.regular(4, 2, 0.9, class_probs=[0.5, 0.5], child_off_probs=[1.0, 0.0])
        levels = [2.0 * level - 1.0 for level in tree.sample(256, rng)[1]]
        label, x = levels[0], levels[-1]
        latents = np.concatenate(levels, axis=1).T
        latents = latents - latents.mean(axis=1, keepdims=True)
        network = CDAG.layered((8, 8, 4, 1), (TANH, TANH, LINEAR), rng, scale=0.3)
        for row, steps in enumerate(STEPS):
            network = network.train(x, lambda out, y=label: y - out, step=0.05, steps=steps)
            activations = network.forward(x)
            output = activations.values[:, network.outputs]
            gradients = network.backward(activations, label - output)
            found = edge_correlations(network, activations, gradients, latents)
            small = found.condition
            broken = (found.actual < correlation_bound(*found.angles) - 1e-9)[small]
            counts[row] += small.size, small.sum(), broken.sum()
    print("| steps | pairs with a small sum of angles | of these, wrong sign |")
    print("|---|---|---|")
    for steps, (pairs, small, broken) in zip(np.cumsum(STEPS), counts, strict=True):
        print(f"| {steps} | {small / pairs:.2%} ({small:.0f}) | {broken / small:.2f} |")


if __name__ == "__main__":
    print_drifts()
    print_edges()
