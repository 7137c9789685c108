"""`joma series verify` and `joma probe --series`."""

import json
import os
import pickle
import shutil
import signal
from pathlib import Path

import pytest

import joma.analysis.series
from joma.runs import Run
from tests.cli._command import joma as run_joma
from tests.cli._command import sentence
from tests.cli._tiny import HEADS, LAYERS, TEXT, WORDS, make_model, make_series, make_tokenizer

STEPS = (0, 100, 200, 300, 400, 500)
FLAGS = ("--text", "text.txt", "--window", "16", "--windows", "2")


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    return make_series(tmp_path_factory.mktemp("training"), STEPS)


@pytest.fixture
def series(original) -> Path:
    """An honest series in the current folder."""
    Path("text.txt").write_text(TEXT)
    return Path(shutil.copytree(original, "training"))


@pytest.fixture(autouse=True)
def sketchy_figures(monkeypatch, request) -> None:
    """Figures that are not drawn, for that takes longer than all the rest."""
    if request.node.name != "test_a_sound_one":
        monkeypatch.setattr("joma.report.figures.rendered", lambda *_, **__: b"a picture")


def probe(*more: str, out: str = "here"):
    return run_joma("probe", "--series", "training", *FLAGS, "--out", out, *more)


@pytest.fixture
def measured(monkeypatch) -> list[str]:
    """The checkpoints that are really measured, as they are."""
    sources: list[str] = []
    measure = joma.analysis.series.measure

    def watched(source: str, *arguments, **options):
        sources.append(source)
        return measure(source, *arguments, **options)

    monkeypatch.setattr(joma.analysis.series, "measure", watched)
    return sources


def copy(series: Path, one: int, over: int) -> None:
    shutil.copy(series / f"step{one}/model.safetensors", series / f"step{over}")


def cut_short(series: Path, step: int) -> None:
    path = series / f"step{step}/model.safetensors"
    path.write_bytes(path.read_bytes()[:500])


class TestVerify:
    def test_a_sound_one(self, series):
        result = run_joma("series", "verify", "training")
        assert result.exit_code == 0, result.stderr
        assert "6 checkpoints: none repeated, missing or damaged." in result.stdout
        record = json.loads(run_joma("series", "verify", "training", "--json").stdout)
        assert record["clean"] is True
        assert list(map(int, record["sha256"])) == list(STEPS)
        assert not Path("runs").exists()

    @pytest.mark.parametrize(
        ("damage", "bad", "message"),
        [
            (
                lambda it: copy(it, 500, over=100),
                [100, 500],
                "Steps 100 and 500 are byte",
            ),
            (lambda it: shutil.rmtree(it / "step200"), [200], "Step 200 is missing"),
            (lambda it: cut_short(it, 200), [200], "Step 200 cannot be read"),
        ],
    )
    def test_damaged_ones(self, series, damage, bad: list[int], message: str):
        damage(series)
        result = run_joma("series", "verify", "training")
        assert result.exit_code == 1
        assert message in result.stdout
        result = run_joma("series", "verify", "training", "--json")
        assert result.exit_code == 1
        assert json.loads(result.stdout)["bad_steps"] == bad

    @pytest.mark.parametrize(
        ("names", "message"),
        [
            (["nowhere"], "nowhere is no folder"),
            (["a@step1", "b@step2"], "several series must be folders"),
            (["training/step0"], "holds one checkpoint"),
        ],
    )
    def test_what_is_none(self, series, names: list[str], message: str):
        assert message in sentence(run_joma("series", "verify", *names))


class TestProbe:
    def test_a_sound_one(self, series):
        result = probe()
        assert result.exit_code == 0, result.stderr
        run = Run.open("here")
        assert [path.name for path in run.figures] == ["series.png", "series.svg"]
        log = run.metrics.read("attention_entropy")
        assert sorted(set(log["step"])) == list(STEPS)
        assert len(log["value"]) == len(STEPS) * LAYERS * (1 + HEADS)
        assert "Attention entropy drops and bounces back" in result.stdout
        assert run.read_json("outcome")["sound"] is True
        alone = run_joma("probe", "training/step200", *FLAGS, "--json")
        expected = {
            (r["metric"], r["module"], r["head"]): r["value"] for r in json.loads(alone.stdout)
        }
        log = run.metrics.read()
        for step, name, module, head, value in zip(
            *(log[key] for key in ("step", "name", "module", "head", "value")), strict=True
        ):
            if step == 200:
                key = (name, module, None if head < 0 else head)
                assert value == pytest.approx(expected.pop(key), rel=1e-6)
        assert not expected

    def test_what_is_finished_is_not_done_again(self, series, measured):
        assert probe().exit_code == 0
        assert len(measured) == len(STEPS)
        before = Run.open("here").metrics.read()["value"].tolist()
        assert f"  done: {', '.join(map(str, STEPS))}\n" in probe("--dry-run").stdout
        message = sentence(probe("--seed", "1"))
        assert "--out here holds a probe-series run with other settings" in message
        assert probe().exit_code == 0
        assert len(measured) == len(STEPS)
        assert Run.open("here").metrics.read()["value"].tolist() == before

    def test_a_damaged_measurement_is_made_again(self, series, measured):
        assert probe().exit_code == 0
        kept = Path("here/steps/step-200.json")
        whole = kept.read_bytes()
        for place in range(0, len(whole), len(whole) // 50):
            kept.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            assert not joma.analysis.series.is_done(Path("here"), 200)
        measured.clear()
        assert probe().exit_code == 0
        assert measured == ["training/step200"]
        assert joma.analysis.series.is_done(Path("here"), 200)

    def test_new_and_changed_checkpoints_are(self, series, measured):
        assert probe().exit_code == 0
        del measured[:]
        shutil.copytree(series / "step500", series / "step600")
        copy(series, 0, over=200)
        assert probe().exit_code == 1
        assert measured == ["training/step200", "training/step600"]

    def test_those_whose_configuration_or_tokenizer_changed_are(self, series, measured):
        assert probe().exit_code == 0
        del measured[:]
        config = json.loads((series / "step200/config.json").read_text())
        (series / "step200/config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.1}))
        make_tokenizer(series / "step400", reversed(WORDS))
        (series / "step300/README.md").write_text("It went well.")
        (series / "step500/config.json").touch()
        kept = Path("here/steps/step-0.json")  # as if it did not say of what configuration it is
        kept.write_text(json.dumps({**json.loads(kept.read_text()), "settings": None}))
        assert probe().exit_code == 0
        assert measured == ["training/step0", "training/step200", "training/step400"]
        assert probe().exit_code == 0
        assert len(measured) == 3

    @pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
    def test_interrupted(self, series, measured, monkeypatch, number: signal.Signals, code: int):
        watched = joma.analysis.series.measure

        def interrupted(source: str, *arguments, **options):
            if source.endswith("step300"):
                signal.raise_signal(number)
            return watched(source, *arguments, **options)

        monkeypatch.setattr(joma.analysis.series, "measure", interrupted)
        monkeypatch.setattr("sys.argv", ["joma", "probe", "--series", "training"])
        result = probe()
        assert result.exit_code == code
        assert "Continue with: joma probe --series training" in result.stderr
        assert Run.open("here").read_json("outcome") == {"status": "interrupted"}
        monkeypatch.setattr(joma.analysis.series, "measure", watched)
        assert probe().exit_code == 0
        assert measured == [f"training/step{step}" for step in STEPS]

    def test_damaged(self, series):
        copy(series, 300, over=100)
        cut_short(series, 400)
        result = probe("--json")
        assert result.exit_code == 1
        record = json.loads(result.stdout)
        assert record["done"] == [0, 100, 200, 300, 500]
        assert record["integrity"]["bad_steps"] == [100, 300, 400]
        assert "step400/model.safetensors is cut short" in record["failed"]["400"]
        assert len(record["table"]) == LAYERS
        assert "entropy at 500" in record["table"][0]

    def test_the_rest_goes_on_without_a_poisoned_one(self, series):
        (series / "step200" / "model.safetensors").unlink()
        (series / "step200" / "pytorch_model.bin").write_bytes(pickle.dumps(_Poison()))
        result = probe()
        assert result.exit_code == 1
        assert not Path("it-ran").exists()
        assert "Step 200 cannot be read" in result.stdout
        assert "5 measured" in result.stdout

    def test_bad_input(self, series):
        make_model(Path("model"))
        message = sentence(run_joma("probe", "model", "--series", "training"))
        assert "--series must stand without MODEL" in message
        assert "holds one checkpoint" in sentence(run_joma("probe", "--series", "model"))

    def test_revisions_of_a_hub_id(self, series, monkeypatch):
        from huggingface_hub.errors import RevisionNotFoundError

        def found(name: str | Path, revision: str | None) -> tuple[Path, list[str]]:
            folder = Path(name) if Path(name).is_dir() else series / str(revision)
            if folder.is_dir():
                return folder, []
            cause = RevisionNotFoundError.__new__(RevisionNotFoundError)
            raise ValueError(f"{name} has no revision {revision!r}") from cause

        monkeypatch.setattr("joma.models.hub._found", found)
        revisions = "step0,step100,step150,step300"
        result = run_joma("probe", "--series", f"some/model@{revisions}", *FLAGS, "--json")
        assert result.exit_code == 1
        record = json.loads(result.stdout)
        assert record["done"] == [0, 100, 300]
        assert record["integrity"]["bad_steps"] == [150]
        result = run_joma("series", "verify", f"some/model@{revisions}")
        assert result.exit_code == 1
        assert "Step 150 is missing: some/model has no revision 'step150'." in result.stdout


class _Poison:
    def __reduce__(self):
        return os.system, ("touch it-ran",)
