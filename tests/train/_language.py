"""A small text, small language models, and trainings of them to compare."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from joma.runs import Run
from joma.train.language import (
    Config,
    LanguageTraining,
    Processes,
    Trained,
    changing,
    series_folder,
    train,
)

STEPS = 12
SIZES: dict[str, dict[str, Any]] = {
    "gpt_neox": {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    },
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32},
    "llama": {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "tie_word_embeddings": True,
    },
    "opt": {
        "hidden_size": 16,
        "word_embed_proj_dim": 16,
        "ffn_dim": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 32,
    },
}


def write_text(folder: Path) -> Path:
    """A text with something to learn in it."""
    folder.mkdir()
    for split, seed in (("train", 0), ("valid", 1)):
        words = np.random.default_rng(seed).choice(["the", "cat", "sat", "on", "mat.\n"], 600)
        (folder / f"{split}.txt").write_text(" ".join(words))
    return folder


def make(text: Path, kind: str = "gpt_neox", **sections: dict[str, Any]) -> Config:
    """A small training, in which a checkpoint is due at every opportunity."""
    given: dict[str, dict[str, Any]] = {
        "model": {"type": kind, **SIZES[kind]},
        "data": {"corpus": str(text), "window": 16, "batch": 4},
        "optimizer": {"learning_rate": 0.01, "warmup": 2, "schedule": "cosine"},
        "training": {"steps": STEPS},
        "checkpoints": {"schedule": [0, 4, 8], "seconds": 0.0},
        "validation": {"every": 5, "windows": 6},
        "monitor": {"off": True},
    }
    for name, section in sections.items():
        given[name] = {**given[name], **section}
    return Config.of(given)


def begin(config: Config, folder: Path, **options: Any) -> Trained:
    run = Run.resume("train", config.sections(), out=folder, changing=changing(config))
    return train(config, run, **options)


def trainer_of(config: Config, processes: Processes | None = None) -> LanguageTraining:
    """A training without a folder, to make its steps one by one."""
    return LanguageTraining(config, None, processes or Processes())


def logged(folder: Path, name: str) -> tuple[list[int], list[float]]:
    rows = Run.open(folder).metrics.read(name)
    return rows["step"].tolist(), rows["value"].tolist()


def ended(folder: Path) -> tuple[Any, ...]:
    """What a training leaves: losses, the state it could go on from, and the last model."""
    (last,) = Run.open(folder).checkpoints.steps[:1]
    files = [folder / "checkpoints" / f"step-{last:09d}.safetensors"]
    files.append(series_folder(folder, last) / "model.safetensors")
    names = ("loss", "validation_loss")
    return (*(logged(folder, name) for name in names), *(file.read_bytes() for file in files))


class Stop(BaseException):
    """What ends a training before its end."""


def stop_after(step: int) -> Callable[[str, int, int], None]:
    def progress(what: str, done: int, total: int) -> None:
        if done >= step:
            raise Stop("stopped")

    return progress
