"""The block behind Figs. 2 and 3: linear activation, softmax attention, cross-entropy."""

from dataclasses import dataclass

import numpy as np

from joma.theory import block

CLASSES, DISTINCT, TOKENS = 20, 10, 20
STEP, STEPS, TEMPERATURE, SPREAD = 0.1, 2000, 0.5, 0.01
TITLES = {
    "smooth": "distribution shifts smoothly from class to class",
    "random": "distribution drawn at random for each class",
}


@dataclass(frozen=True)
class TrainedBlock:
    """One of the two data sets and the block trained on it.

    Attributes:
        x: frequency of each token in each class, shape (tokens, classes).
        path: the training, kept every tenth step.
        steps: the steps kept.
    """

    x: np.ndarray
    path: block.Trajectory
    steps: np.ndarray


def train(kind: str, seed: int) -> TrainedBlock:
    """Train the block on one kind of data, `smooth` or `random`."""
    rng = np.random.default_rng([seed, list(TITLES).index(kind)])
    x = frequencies(kind, rng)
    model = block.Block("softmax", "linear", tau=TEMPERATURE)
    samples = block.Samples(x.T, labels=np.arange(CLASSES))
    start = block.State(
        SPREAD * rng.normal(size=(TOKENS, CLASSES)),
        SPREAD * rng.normal(size=(1, TOKENS)),
        SPREAD * rng.normal(size=(1, CLASSES)),
    )
    steps = np.arange(0, STEPS + 1, 10)
    path = block.simulate(model, samples, steps * STEP, initial=start, descent_step=STEP)
    return TrainedBlock(x, path, steps)


def frequencies(kind: str, rng: np.random.Generator) -> np.ndarray:
    """Return token frequencies: distinct tokens peak at their classes, common ones are random."""
    x = rng.uniform(0, 0.5, size=(TOKENS, CLASSES))
    if kind == "smooth":
        token, label = np.arange(DISTINCT)[:, None], np.arange(CLASSES)[None]
        x[:DISTINCT] = np.exp(-((token - label * DISTINCT / CLASSES) ** 2) / 30)
    return x / x.sum(axis=0)
