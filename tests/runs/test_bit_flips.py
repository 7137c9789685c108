"""Single flipped bits in the files of a run: every one is refused, in one sentence.

The fast half flips bits at evenly spread places of every file. `pytest -m slow` flips some 4,000,
at random places from a fixed seed.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from joma.data.tokenizing import BYTES
from joma.errors import JomaError
from joma.models.checksums import check_checksums
from joma.runs import Run
from joma.train.language._export import export

Read = Callable[[Run], object]


def _config(run: Run) -> object:
    return run.config


def _json(run: Run) -> object:
    return run.read_json("findings")


def _table(run: Run) -> object:
    return run.read_table("curve")


def _metrics(run: Run) -> object:
    return run.metrics.read()


def _checkpoint(run: Run) -> object:
    found = run.checkpoints.latest()
    if found.checkpoint is None:
        raise JomaError(found.refused[0])
    return found.checkpoint


def _model(run: Run) -> object:
    return check_checksums(run.path / "series" / "step-000007")


FILES: dict[str, Read] = {
    "config.json": _config,
    "environment.json": _config,
    "manifest.json": _config,
    "findings.json": _json,
    "tables/curve.parquet": _table,
    "metrics/part-000000.parquet": _metrics,
    "metrics/part-000001.parquet": _metrics,
    "checkpoints/step-000000007.safetensors": _checkpoint,
    "series/step-000007/model.safetensors": _model,
    "series/step-000007/config.json": _model,
    "series/step-000007/SHA256SUMS": _model,
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
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=8, n_layer=1, n_head=2))
    weights = {name: it.contiguous() for name, it in model.state_dict().items()}
    weights.pop("lm_head.weight")  # tied
    export(made.path / "series" / "step-000007", model, weights, BYTES)
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
