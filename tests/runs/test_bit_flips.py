"""Single flipped bits in the files of a run: every one is refused, in one sentence.

The fast half flips bits at evenly spread places of every file. `pytest -m slow` flips some 4,000,
at random places from a fixed seed.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from joma.errors import JomaError
from joma.runs import Run

Read = Callable[[Run], object]


def _checkpoint(run: Run) -> object:
    found = run.checkpoints.latest()
    if found.checkpoint is None:
        raise JomaError(found.refused[0])
    return found.checkpoint


FILES: dict[str, Read] = {
    "config.json": lambda run: run.config,
    "environment.json": lambda run: run.config,
    "manifest.json": lambda run: run.config,
    "findings.json": lambda run: run.read_json("findings"),
    "tables/curve.parquet": lambda run: run.read_table("curve"),
    "metrics/part-000000.parquet": lambda run: run.metrics.read(),
    "metrics/part-000001.parquet": lambda run: run.metrics.read(),
    "checkpoints/step-000000007.safetensors": _checkpoint,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    made = Run.create("fit", {"seed": 1}, out=tmp_path_factory.mktemp("flips") / "run")
    random = np.random.default_rng(0)
    made.write_json("findings", [{"step": 3, "entropy": 0.25}])
    words = [f"layer {n}" for n in range(100)]
    made.write_table("curve", {"value": random.normal(size=100), "word": words})
    for start in (0, 100):
        made.metrics.append_many(
            np.arange(start, start + 100), "loss", random.normal(size=(100, 3)), module="block.0"
        )
        made.metrics.append(start, "entropy", 1.5, module="attn", kind="self", layer=0, bound=0.1)
        made.metrics.flush()
    made.checkpoints.save(7, {"weight": random.normal(size=(20, 10))}, {"seeds": [1, 2]})
    return made


def silent_flips(run: Run, name: str, places: np.ndarray) -> list[int]:
    """Return those of the bits, by their number in the file, whose flip no reader noticed."""
    path = run.path / name
    whole = path.read_bytes()
    silent, sentences = [], set()
    try:
        for place in places.tolist():
            flipped = bytearray(whole)
            flipped[place // 8] ^= 1 << place % 8
            path.write_bytes(flipped)
            try:
                FILES[name](Run.open(run.path))
            except JomaError as error:
                sentences.add(str(error))
            else:
                silent.append(place)
    finally:
        path.write_bytes(whole)
    assert not any("\n" in sentence for sentence in sentences)
    return silent


def bits(path: Path) -> int:
    return 8 * path.stat().st_size


@pytest.mark.parametrize("name", FILES)
def test_flips_all_over_a_file_are_refused(run: Run, name: str):
    FILES[name](Run.open(run.path))  # it is whole
    count = bits(run.path / name)
    assert silent_flips(run, name, np.linspace(0, count - 1, 25).astype(int)) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_flips_at_random_are_refused(run: Run, name: str):
    random = np.random.default_rng(sum(name.encode()))
    count = bits(run.path / name)
    places = random.choice(count, size=min(375, count), replace=False)
    assert silent_flips(run, name, places) == []
    FILES[name](Run.open(run.path))
