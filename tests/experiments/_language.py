"""Sizes and curves for the tests of Fig. 6 and 8."""

from pathlib import Path

import numpy as np

from joma.experiments.language import (
    SIZES,
    WIKITEXT_2,
    LanguageSetting,
    LanguageSize,
    Published,
    results,
)
from joma.experiments.language.curves import ENTROPY_FILE, LOSS_FILE, EntropyCurves, Key

FULL = LanguageSetting(SIZES["full"], words=28_782, stream=102_499, digests={})
SIZE = LanguageSize(
    corpus="embedded",
    vocabulary=40,
    train_tokens=2 * 90,
    valid_tokens=2 * 90,
    width=8,
    hidden=6,
    streams=2,
    valid_streams=2,
    seeds=2,
    learning_rate=1e-2,
    learning_rates=(1e-3, 1e-2),
    every=2,
    last=4,
)


def curves(
    depth: int,
    rate: float = 1e-4,
    loss: float = 5.0,
    low: float = 1.5,
    end: float = 2.2,
    seeds: int = 3,
    start: float = 2.5,
) -> EntropyCurves:
    """Entropy that falls from `start` to `low` at the third measurement and ends at `end`."""
    steps = FULL.published_steps
    fall = np.interp(steps, [0, 2000, 20_000, 58_000], [start, low, end, end])
    entropy = np.tile(fall[None, :, None], (depth, 1, seeds)) + 0.01 * np.arange(seeds)
    best = np.tile(np.interp(steps, [0, 50_000, 58_000], [10, loss, loss + 0.1])[:, None], seeds)
    return EntropyCurves(depth, rate, steps, entropy, best, entropy, 10 * entropy)


def depths(of: Published = WIKITEXT_2, **changed: EntropyCurves) -> dict[Key, EntropyCurves]:
    """Networks as published, some (d5) in the place of others."""
    found = {depth: curves(depth, loss=loss) for depth, loss in of.loss.items()} | {
        int(name[1:]): own for name, own in changed.items()
    }
    return {(depth, 1e-4): own for depth, own in found.items()}


def rates(**changed: EntropyCurves) -> dict[Key, EntropyCurves]:
    """Networks of five layers as recorded, some in the place of others."""
    found = {
        rate: curves(5, rate, loss, low=0.1, end=0.05) if rate > 1e-4 else curves(5, rate, loss)
        for rate, loss in results.RECORDED_LOSS.items()
    }
    found |= {own.rate: own for own in changed.values()}
    return {(5, rate): own for rate, own in found.items()}


def write_reference(folder: Path, shown: dict[Key, EntropyCurves]) -> Path:
    """A folder with curves as they were recorded."""
    folder.mkdir()
    entropy, loss = (
        ["layers,lr,seed,step,layer,attention_entropy"],
        ["layers,lr,seed,step,val_loss"],
    )
    for (depth, rate), own in shown.items():
        for row, step in enumerate(own.steps):
            for seed in range(own.seeds):
                place = f"{depth},{rate},{seed},{step}"
                loss.append(f"{place},{own.loss[row, seed]}")
                entropy += [
                    f"{place},{layer},{own.entropy[layer, row, seed]}" for layer in range(depth)
                ]
    (folder / ENTROPY_FILE).write_text("\n".join(entropy) + "\n")
    (folder / LOSS_FILE).write_text("\n".join(loss) + "\n")
    return folder
