"""Checkpoint series: where they are, and what is found in damaged ones but not in honest ones."""

import hashlib
import json
import math
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from joma.models.series import (
    PYTHIA,
    Series,
    SeriesCheckpoint,
    kept_fingerprint,
    settings_hashes,
    step_of,
    verify,
)
from tests.models.test_weight_files import Trap


class TestSteps:
    @pytest.mark.parametrize(
        ("name", "step"),
        [
            ("step0", 0),
            ("step1000", 1000),
            ("global_step143000", 143_000),
            ("iter_0000500", 500),
            ("pythia-70m-step512", 512),
            ("final", None),
            ("", None),
        ],
    )
    def test_of_a_name(self, name: str, step: int | None):
        assert step_of(name) == step


class TestSeries:
    def test_a_folder_of_folders_by_number_not_by_letter(self, tmp_path):
        for name in ("step1000", "step20", "step3", "logs-2024", ".hidden-5", "wandb"):
            (tmp_path / name).mkdir()
        (tmp_path / "step7").write_text("a file")
        series = Series.of(tmp_path)
        assert series.steps == (3, 20, 1000)
        assert series.checkpoints[0] == SeriesCheckpoint(3, str(tmp_path / "step3"))
        assert Series.of([tmp_path / "b-10", tmp_path / "a-9"]).steps == (9, 10)  # not yet there

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
            ("some/model@main", {}, "revision 'main' of some/model must have its step"),
            ([], {}, "must not be empty"),
            (["init", "step3"], {}, "folder init must have its step in its name"),
            (["a/step3", "b/step3"], {}, "a/step3 and b/step3 are both of step 3"),
            ("some/model@step0", {"schedule": "now"}, "got 'now'"),
        ],
    )
    def test_what_is_none(self, source, options, message: str):
        with pytest.raises(ValueError, match=r"series|revision|folder|checkpoints|schedule") as bad:
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


# Files

STEPS = (0, 50, 100, 150, 200, 300, 350)


def save(folder: Path, **changes: torch.Tensor) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    step = int(folder.name.removeprefix("step"))
    weights = {"in.weight": torch.full((3, 4), float(step)), "out.bias": torch.arange(3.0)}
    save_file({**weights, **changes}, folder / "model.safetensors")


@pytest.fixture
def series(tmp_path: Path) -> Path:
    """A series on disk that lacks step 250."""
    for step in STEPS:
        save(tmp_path / f"series/step{step}")
    return tmp_path / "series"


def found(folder, **options) -> list[tuple[str, tuple[int, ...]]]:
    """The kinds and steps of what is found, the missing step 250 aside."""
    integrity = verify(Series.of(folder, **options))
    record = integrity.as_json()
    assert json.loads(json.dumps(record)) == record
    return [(it.kind, it.steps) for it in integrity.findings if it.steps != (250,)]


class TestVerify:
    def test_a_step_of_even_spacing_is_missing(self, series):
        integrity = verify(Series.of(series))
        assert [it.sentence for it in integrity.findings] == [
            "step 250 is missing: steps are 50 apart."
        ]
        assert integrity.bad_steps == (250,)
        assert integrity.unverified == STEPS
        save(series / "step250")
        save(series / "step371")  # training ended there
        assert verify(Series.of(series)).clean

    @pytest.mark.parametrize("steps", [(0,), (0, 1000), (0, 1000, 3000), (0, 1, 2, 4, 8, 16)])
    def test_nothing_is_missing_where_spacing_is_not_even(self, tmp_path, steps):
        for step in steps:
            save(tmp_path / f"step{step}")
        assert verify(Series.of(tmp_path)).clean

    def test_a_schedule_that_is_given_counts(self, series):
        assert found(series, schedule="0,50,75") == [("missing", (75,))]
        folders = [series / f"step{step}" for step in (0, 77)]
        assert found(folders) == [("missing", (77,))]

    def test_repeated(self, series):
        shutil.copytree(series / "step200", series / "step350", dirs_exist_ok=True)
        shutil.copytree(series / "step0", series / "step50", dirs_exist_ok=True)
        assert found(series) == [("duplicate", (0, 50)), ("duplicate", (200, 350))]
        first, *_ = verify(Series.of(series)).findings
        assert "a learning rate that begins at zero" in first.sentence

    def test_damaged(self, series):
        path = series / "step50" / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
        save(series / "step100", **{"out.bias": torch.full((3,), math.nan)})
        (series / "step200" / "model.safetensors").unlink()
        assert found(series) == [("unreadable", (step,)) for step in (50, 100, 200)]
        cut, nan, *_ = verify(Series.of(series)).findings
        assert cut.sentence.startswith(f"step 50 cannot be read: {path} is cut short")
        assert nan.sentence.endswith("holds NaN or infinity in out.bias.")

    def test_of_another_model(self, series):
        save(series / "step100", **{"out.bias": torch.zeros(7)})
        finding, _ = verify(Series.of(series)).findings
        assert (finding.kind, finding.steps) == ("unlike", (100,))
        assert "out.bias, which is 7 and should be 3" in finding.sentence

    def test_a_pickle_that_wants_to_run_is_not_run(self, series):
        (series / "step50" / "model.safetensors").unlink()
        witness = series / "it-ran"
        (series / "step50" / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(witness)))
        assert found(series) == [("unreadable", (50,))]
        assert not witness.exists()

    def test_nothing_readable(self, tmp_path):
        (tmp_path / "step0").mkdir()
        (tmp_path / "step5").mkdir()
        with pytest.raises(ValueError, match=r"none of the 2 checkpoints of .* can be read"):
            verify(Series.of(tmp_path))


def test_a_fingerprint_is_kept_until_a_file_changes(series, tmp_path):
    kept, folder = tmp_path / "kept.json", series / "step50"
    first = kept_fingerprint(kept, folder)
    written = kept.stat().st_mtime_ns
    assert kept_fingerprint(kept, folder) == first
    assert kept.stat().st_mtime_ns == written
    save(folder, **{"out.bias": torch.ones(9)})
    assert kept_fingerprint(kept, folder).shapes["out.bias"] == (9,)
    kept.write_bytes(kept.read_bytes()[:-3])
    assert kept_fingerprint(kept, folder).shapes["out.bias"] == (9,)


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
