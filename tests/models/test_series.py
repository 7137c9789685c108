"""Checkpoint series: where they are, and what is found in damaged ones but not in honest ones."""

import hashlib
import json
import math
import os
import pickle
import shutil
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from joma import models
from joma.models._schedule import inferred
from joma.models.series import (
    PYTHIA,
    SKETCH_SIZE,
    Integrity,
    Series,
    SeriesCheckpoint,
    fingerprint,
    misplaced,
    settings_hashes,
    step_of,
    verify,
)

few = settings(max_examples=25, deadline=None)


class TestSteps:
    @pytest.mark.parametrize(
        ("name", "step"),
        [
            ("step0", 0),
            ("step1000", 1000),
            ("checkpoint-500", 500),
            ("000500", 500),
            ("global_step143000", 143_000),
            ("step1000-tokens4B", 1000),
            ("iter_0000500", 500),
            ("pythia-70m-step512", 512),
            ("model-7", 7),
            ("final", None),
            ("", None),
        ],
    )
    def test_of_a_name(self, name: str, step: int | None):
        assert step_of(name) == step


def test_the_room_hands_out_what_a_user_needs_of_series():
    assert (models.Series, models.verify, models.Integrity) == (Series, verify, Integrity)
    assert {"Series", "verify", "Integrity"} <= set(models.__all__)


class TestSeries:
    def test_a_folder_of_folders_by_number_not_by_letter(self, tmp_path):
        for name in ("step1000", "step20", "step3", "logs-2024", ".hidden-5", "wandb"):
            (tmp_path / name).mkdir()
        (tmp_path / "step7").write_text("a file")
        series = Series.of(tmp_path)
        assert series.steps == (3, 20, 1000)
        assert series.checkpoints[0] == SeriesCheckpoint(3, str(tmp_path / "step3"))

    def test_a_list_of_folders_need_not_be_sorted_nor_there(self, tmp_path):
        assert Series.of([tmp_path / "b-10", tmp_path / "a-9"]).steps == (9, 10)

    def test_revisions_of_a_hub_id(self):
        series = Series.of("EleutherAI/pythia-70m@step1000,step0")
        assert series.checkpoints == (
            SeriesCheckpoint(0, "EleutherAI/pythia-70m", "step0"),
            SeriesCheckpoint(1000, "EleutherAI/pythia-70m", "step1000"),
        )
        assert series.schedule == (0, 1000)
        every = Series.of("EleutherAI/pythia-70m", revisions="pythia")
        assert every.steps == PYTHIA == every.schedule

    def test_pythias_schedule(self):
        # the model cards of EleutherAI/pythia: 154 checkpoints, step0, ten log-spaced, 143 even
        assert len(PYTHIA) == 154
        assert PYTHIA[:13] == (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000, 2000)
        assert PYTHIA[-1] == 143_000

    @pytest.mark.parametrize(
        ("source", "options", "message"),
        [
            ("nowhere", {}, "nowhere is no folder"),
            ("some/model@main", {}, "got 'main'"),
            ("some/model@", {}, "got ''"),
            ([], {}, "got no folder"),
            (["init", "step3"], {}, "folder init must have its step in its name"),
            (["a/step3", "b/step3"], {}, "a/step3 and b/step3 are both of step 3"),
            ("some/model@step0", {"schedule": "now"}, "got 'now'"),
            ("some/model@step0", {"schedule": [-1]}, "from 0 on"),
        ],
    )
    def test_what_is_none(self, source, options, message: str):
        with pytest.raises(
            ValueError, match=r"series|revisions|folder|checkpoints|schedule"
        ) as bad:
            Series.of(source, **options)
        assert message in str(bad.value)

    def test_folders_that_are_none(self, tmp_path):
        (tmp_path / "data").mkdir()
        with pytest.raises(ValueError, match="its folders are data"):
            Series.of(tmp_path)
        (tmp_path / "model.safetensors").touch()
        with pytest.raises(ValueError, match="holds one checkpoint"):
            Series.of(tmp_path)
        with pytest.raises(ValueError, match="revisions go with a hub id"):
            Series.of(tmp_path, revisions="step0")


def gaps(steps) -> list[int] | None:
    schedule = inferred(steps)
    return None if schedule is None else sorted(set(schedule.steps) - set(steps))


class TestSchedules:
    @pytest.mark.parametrize(
        ("steps", "missing"),
        [
            ([0, 500, 1000, 2000], [1500]),
            ([0, 500, 1000, 2000, 2222], [1500]),  # training ended at 2222
            ([0, 10, 20, 30, 40, 60, 80, 90, 100], [50, 70]),
            ([0, 1, 2, 4, 16, 32], [8]),
            ([1, 2, 4, 8, 16, 100, 200, 300, 500], [400]),
            ([0, 1024, 2048, 3072, 4096, 6144], [5120]),
            ([0, 1, 2, 4], []),
            ([500, 1000, 1500], []),
            ([0, 500, 1000, 1234], []),
            # chosen by somebody, for all one can tell
            ([7], None),
            ([0, 1000], None),
            ([0, 1000, 3000], None),
            ([0, 1000, 10_000, 143_000], None),
            ([0, 100, 200, 300, 1300, 2300, 3300], None),
            ([100, 200, 300, 400, 600, 800, 1000], None),
            ([0, 1, 2, 4, 8, 512, 1000, 2000, 4000, 8000, 16_000], None),
        ],
    )
    def test_what_is_missing(self, steps, missing):
        assert gaps(steps) == missing

    @pytest.mark.parametrize("gone", [1, 4, 512, 1000, 2000, 70_000, 142_000])
    def test_one_of_pythias(self, gone: int):
        assert gaps(PYTHIA) == []
        assert gaps([step for step in PYTHIA if step != gone]) == [gone]

    @few
    @given(
        first=st.integers(0, 1000),
        spacing=st.integers(1, 10_000),
        count=st.integers(6, 40),
        data=st.data(),
    )
    def test_one_inside_of_an_even_series(self, first, spacing, count, data):
        steps = [first + spacing * k for k in range(count)]
        assert not gaps(steps)
        gone = data.draw(st.sampled_from(steps[2:-2]))
        assert gaps([step for step in steps if step != gone]) == [gone]


# Real little trainings


class _Network(nn.Module):
    """Predicts the next of 32 letters from the last four; attention over their embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.query, self.lower, self.upper = nn.Linear(16, 16), nn.Linear(16, 64), nn.Linear(64, 16)
        self.out = nn.Linear(16, 32)

    def forward(self, tokens):
        x = self.embedding(tokens)
        attention = (self.query(x) @ x.mT / 4).softmax(-1)
        x = (x + attention @ x).mean(1)
        return self.out(x + self.upper(functional.relu(self.lower(x))))


def _cosine(t: float) -> float:
    return 0.1 + 0.9 * (1 + math.cos(math.pi * t)) / 2


TRAININGS = {
    # optimizer, learning rate, its course from t = 0 to 1, weight decay, even or doubling steps
    "adam, cosine, as Pythia": (torch.optim.AdamW, 3e-3, _cosine, 0.1, "pythia"),
    "adam, large and constant": (torch.optim.AdamW, 3e-2, lambda t: 1.0, 0.0, "even"),
    "adam, forgetful, then zero": (torch.optim.AdamW, 2e-2, lambda t: float(t < 0.97), 2.0, "even"),
    "adam, abrupt decay": (torch.optim.AdamW, 1e-2, lambda t: min(1, (1 - t) / 0.05), 0.1, "even"),
    "adam, warm-up": (torch.optim.AdamW, 3e-3, lambda t: min(1, 10 * t), 0.0, "pythia"),
    "sgd": (torch.optim.SGD, 0.5, lambda t: 1.0, 0.0, "even"),
    "sgd, to zero": (torch.optim.SGD, 0.5, lambda t: 1 - t, 0.0, "even"),
}
LENGTH = 500


@cache
def trained(name: str) -> tuple[tuple[int, ...], tuple[dict[str, torch.Tensor], ...]]:
    """Steps and weights of a training on the standard library's prose."""
    from pydoc_data.topics import topics

    optimizer, rate, course, decay, kind = TRAININGS[name]
    letters = torch.tensor(list("".join(topics.values()).encode())) % 32
    even = range(0, LENGTH + 1, 25)
    steps = even if kind == "even" else (0, 1, 2, 4, 8, 16, 32, *range(50, LENGTH + 1, 50))
    generator = torch.Generator().manual_seed(1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = _Network()
    update = optimizer(network.parameters(), lr=rate, weight_decay=decay)
    kept = []
    for step in range(LENGTH + 1):
        if step in steps:
            kept.append({key: value.clone() for key, value in network.state_dict().items()})
        update.param_groups[0]["lr"] = rate * course(step / LENGTH)
        places = torch.randint(len(letters) - 5, (32,), generator=generator)
        windows = letters[places[:, None] + torch.arange(5)]
        update.zero_grad()
        functional.cross_entropy(network(windows[:, :-1]), windows[:, -1]).backward()
        update.step()
    return tuple(steps), tuple(kept)


@cache
def distances(name: str) -> np.ndarray:
    vectors = np.stack(
        [torch.cat([t.flatten() for t in w.values()]).double().numpy() for w in trained(name)[1]]
    )
    return np.linalg.norm(vectors[:, None] - vectors, axis=-1)


def out_of_place(name: str, order: list[int]) -> set[int]:
    """What is found when the checkpoints of a training stand in another order."""
    found = misplaced(distances(name)[np.ix_(order, order)])
    return {place for it in found for place in it.moved}


def exchanged(count: int, one: int, two: int) -> list[int]:
    order = list(range(count))
    order[one], order[two] = order[two], order[one]
    return order


@pytest.mark.parametrize("name", TRAININGS)
class TestOrder:
    def test_an_honest_training_is_in_order(self, name: str):
        count = len(distances(name))
        assert out_of_place(name, list(range(count))) == set()
        for gone in range(count):  # and stays so without one of its checkpoints
            assert out_of_place(name, [k for k in range(count) if k != gone]) == set()
        assert out_of_place(name, list(range(0, count, 3))) == set()

    def test_exchanged(self, name: str):
        count, random = len(distances(name)), np.random.default_rng(0)
        noticed = []
        for _ in range(30):
            # Not the last two: noise that a falling learning rate takes away has the same effect.
            one, two = sorted(random.choice(count - 2, 2, replace=False))
            noticed.append(out_of_place(name, exchanged(count, one, two)) == {one, two})
        if "forgetful" in name:  # nothing but noise is left between two of its checkpoints
            assert np.mean(noticed) > 0.3
        else:
            equal = np.diag(distances(name), 1) == 0  # before a learning rate that begins at 0
            assert np.mean(noticed) >= 1 - 0.1 * equal.any()

    def test_early_ones_with_weights_from_the_end(self, name: str):
        count = len(distances(name))
        for early in range(count // 2):
            order = list(range(count))
            order[early] = count - 1
            assert out_of_place(name, order) == {early}
            order[early] = count - 3
            assert early in out_of_place(name, order)

    def test_many_of_them(self, name: str):
        count = len(distances(name))
        order = list(range(count))
        order[1:4] = [count - 3, count - 2, count - 4]
        order[6] = count - 2
        assert out_of_place(name, order) >= {1, 2, 3, 6}


@few
@given(
    seed=st.integers(0, 2**32 - 1),
    drift=st.floats(0, 1),
    count=st.integers(3, 20),
    forget=st.floats(0, 1),
)
def test_walks_are_in_order(seed: int, drift: float, count: int, forget: float):
    """Steady drift, diffusion and forgetting, in any mixture, in 2,000 dimensions."""
    random = np.random.default_rng(seed)
    direction, place, walk = random.normal(size=2000), np.zeros(2000), []
    for step in range(count):
        place = (1 - 0.5 * forget) * place + random.normal(size=2000)
        walk.append(place + drift * step * direction)
    walk = np.stack(walk)
    assert misplaced(np.linalg.norm(walk[:, None] - walk, axis=-1)) == []


@few
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 8))
def test_any_distances_come_to_an_end(seed: int, count: int):
    points = np.random.default_rng(seed).integers(0, 3, size=(count, 2)).astype(float)
    for found in misplaced(np.linalg.norm(points[:, None] - points, axis=-1)):
        assert set(found.moved) <= set(range(count))
        assert 0 <= found.share < 1


# Files

NAME = "adam, cosine, as Pythia"
STEPS = tuple(trained(NAME)[0])


def save(folder: Path, weights) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors")


@pytest.fixture
def series(tmp_path) -> Path:
    """An honest series on disk."""
    folder = tmp_path / "series"
    for step, weights in zip(*trained(NAME), strict=True):
        save(folder / f"step{step}", weights)
    return folder


def found(folder: Path, **options) -> dict[str, tuple[tuple[int, ...], ...]]:
    """The steps of each kind of finding."""
    integrity = verify(Series.of(folder, **options))
    kinds = {finding.kind for finding in integrity.findings}
    return {kind: tuple(it.steps for it in integrity.findings if it.kind == kind) for kind in kinds}


class TestVerify:
    def test_an_honest_series(self, series):
        integrity = verify(Series.of(series))
        assert integrity.clean
        assert integrity.steps == STEPS
        assert integrity.bad_steps == ()
        assert [(it.earlier, it.later) for it in integrity.neighbours] == list(pairwise(STEPS))
        vectors = [torch.cat([t.flatten() for t in w.values()]) for w in trained(NAME)[1]]
        for it, (one, two) in zip(integrity.neighbours, pairwise(vectors), strict=True):
            assert it.distance == pytest.approx(float((one - two).norm() / two.norm()), rel=0.04)
        (files,) = {tuple(files) for files in integrity.hashes.values()}
        assert files == ("model.safetensors",)

    def test_two_verifications_agree(self, series):
        shutil.rmtree(series / "step100")
        shutil.copytree(series / "step500", series / "step8", dirs_exist_ok=True)
        records = [verify(Series.of(series)).as_json() for _ in range(2)]
        assert records[0] == records[1]
        assert json.loads(json.dumps(records[0])) == records[0]
        assert records[0]["bad_steps"] == [8, 100]

    def test_exchanged(self, series):
        (series / "step100").rename(series / "aside")
        (series / "step200").rename(series / "step100")
        (series / "aside").rename(series / "step200")
        assert found(series) == {"misordered": ((100, 200),)}

    def test_the_last_over_an_early_one(self, series):
        shutil.copytree(series / "step500", series / "step8", dirs_exist_ok=True)
        integrity = verify(Series.of(series))
        assert {it.kind: it.steps for it in integrity.findings} == {
            "duplicate": (8, 500),
            "misordered": (8,),
        }
        assert integrity.bad_steps == (8,)
        duplicate = next(it for it in integrity.findings if it.kind == "duplicate")
        assert duplicate.sentence == "steps 8 and 500 are byte-identical."

    def test_the_last_but_two_that_is_the_last(self, series):
        shutil.copytree(series / "step500", series / "step400", dirs_exist_ok=True)
        assert verify(Series.of(series)).bad_steps == (400,)

    def test_repeated(self, series):
        shutil.copytree(series / "step200", series / "step250", dirs_exist_ok=True)
        integrity = verify(Series.of(series))
        assert [it.kind for it in integrity.findings] == ["duplicate"]
        assert integrity.bad_steps == (200, 250)

    def test_equal_weights_in_other_files(self, series):
        weights = trained(NAME)[1][STEPS.index(200)]
        folder = series / "step250"
        (folder / "model.safetensors").unlink()
        parts = [dict(list(weights.items())[:3]), dict(list(weights.items())[3:])]
        where = {}
        for number, part in enumerate(parts, 1):
            name = f"model-0000{number}-of-00002.safetensors"
            save_file(part, folder / name)
            where |= dict.fromkeys(part, name)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
        (finding,) = verify(Series.of(series)).findings
        assert finding.sentence == "steps 200 and 250 hold equal weights in different files."

    def test_a_first_step_that_changed_nothing_is_reported_with_the_reason(self, series):
        shutil.copytree(series / "step0", series / "step1", dirs_exist_ok=True)
        (finding,) = verify(Series.of(series)).findings
        assert "a learning rate that begins at zero" in finding.sentence

    def test_missing(self, series):
        shutil.rmtree(series / "step8")
        shutil.rmtree(series / "step100")
        assert found(series) == {"missing": ((8,), (100,))}
        assert found(series, schedule=STEPS) == {"missing": ((8,), (100,))}
        folders = [series / f"step{step}" for step in (0, 32, 100, 500)]
        assert found(folders) == {"missing": ((100,),)}  # type: ignore[arg-type]

    def test_a_schedule_that_is_given_counts(self, series):
        assert found(series, schedule="0,1,50,75") == {"missing": ((75,),)}

    def test_cut_short(self, series):
        path = series / "step50" / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-100])
        integrity = verify(Series.of(series))
        (finding,) = integrity.findings
        assert finding.kind == "unreadable"
        assert integrity.bad_steps == (50,)
        assert finding.sentence.startswith(f"step 50 cannot be read: {path} is cut short")

    def test_not_finite(self, series):
        weights = dict(trained(NAME)[1][3])
        weights["out.bias"] = torch.full((32,), math.nan)
        save(series / "step4", weights)
        (finding,) = verify(Series.of(series)).findings
        assert finding.kind == "unreadable"
        assert finding.sentence.endswith("holds NaN or infinity in out.bias.")

    def test_of_another_model(self, series):
        save(series / "step4", {**trained(NAME)[1][3], "out.bias": torch.zeros(7)})
        (finding,) = verify(Series.of(series)).findings
        assert (finding.kind, finding.steps) == ("unlike", (4,))
        assert "out.bias, which is 7 and should be 32" in finding.sentence

    def test_empty(self, series):
        (series / "step4" / "model.safetensors").unlink()
        assert found(series) == {"unreadable": ((4,),)}

    def test_a_pickle_that_wants_to_run_is_not_run(self, series):
        folder = series / "step4"
        (folder / "model.safetensors").unlink()
        witness = series / "it-ran"
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Poison(str(witness))))
        assert found(series) == {"unreadable": ((4,),)}
        assert not witness.exists()

    def test_nothing_readable(self, tmp_path):
        (tmp_path / "step0").mkdir()
        (tmp_path / "step5").mkdir()
        with pytest.raises(ValueError, match=r"none of the 2 checkpoints of .* can be read"):
            verify(Series.of(tmp_path))

    def test_everything_at_once(self, series):
        shutil.copytree(series / "step500", series / "step2", dirs_exist_ok=True)
        shutil.rmtree(series / "step150")
        (series / "step300" / "model.safetensors").write_bytes(b"")
        integrity = verify(Series.of(series))
        assert integrity.bad_steps == (2, 150, 300)


class _Poison:
    def __init__(self, witness: str) -> None:
        self.witness = witness

    def __reduce__(self):
        return os.system, (f"touch {self.witness}",)


class TestSettings:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        for name in ("config.json", "tokenizer.json", "vocab.txt", "model.safetensors", "notes.md"):
            (tmp_path / name).write_text(name)
        return tmp_path

    def test_are_configuration_and_tokenizer(self, folder: Path):
        found = settings_hashes(folder)
        assert list(found) == ["config.json", "tokenizer.json", "vocab.txt"]
        assert found["vocab.txt"] == hashlib.sha256(b"vocab.txt").hexdigest()

    def test_with_another_tokenizer(self, folder: Path):
        own = settings_hashes(folder)
        given = settings_hashes(folder, tokenizer=folder / "vocab.txt")
        assert given == {"config.json": own["config.json"], "tokenizer": own["vocab.txt"]}
        assert settings_hashes(folder, tokenizer="bytes") == {"config.json": own["config.json"]}
        theirs = {f"tokenizer/{name}": digest for name, digest in own.items()}
        assert settings_hashes(folder, tokenizer=str(folder)) == {
            "config.json": own["config.json"],
            **theirs,
        }
        with pytest.raises(ValueError, match="neither a folder nor a hub id"):
            settings_hashes(folder, tokenizer="no such/thing/at all")


class TestFingerprints:
    def test_distance_of_large_weights(self, tmp_path):
        """Within four standard errors: a difference in one row, in one column, or everywhere."""
        generator = torch.Generator().manual_seed(0)
        base = torch.randn(512, 1024, generator=generator)
        changes = torch.zeros(3, 512, 1024)
        changes[0, 7] = torch.randn(1024, generator=generator)
        changes[1, :, 7] = torch.randn(512, generator=generator)
        changes[2] = torch.randn(512, 1024, generator=generator)
        save(tmp_path / "base", {"w": base})
        first = fingerprint(tmp_path / "base")
        assert first.norm == pytest.approx(float(base.norm()), rel=1e-5)
        for number, change in enumerate(changes):
            save(tmp_path / str(number), {"w": base + change})
            rows = (
                512 if number < 2 else SKETCH_SIZE
            )  # numbers of the sketch that bear the difference
            error = 4 / math.sqrt(2 * rows)
            estimate = first.distance(fingerprint(tmp_path / str(number)))
            assert estimate == pytest.approx(float(change.norm()), rel=error)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
    def test_other_types_and_masks(self, tmp_path, dtype: torch.dtype):
        mask = torch.ones(3, dtype=torch.bool)
        save(tmp_path / "a", {"w": torch.tensor([3.0, 4.0], dtype=dtype), "mask": mask})
        made = fingerprint(tmp_path / "a")
        assert made.norm == 5
        assert made.shapes == {"w": (2,), "mask": (3,)}
