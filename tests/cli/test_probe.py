"""`joma probe` of one model."""

import json
import math
import os
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch

from joma.runs import Run
from tests.cli._command import joma, sentence
from tests.cli._tiny import HEADS, LAYERS, TEXT, WORDS, make_model, make_tokenizer


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def model(original) -> str:
    """A folder of its own, named as a user would."""
    shutil.copytree(original, "model")
    Path("text.txt").write_text(TEXT)
    return "model"


@pytest.fixture(autouse=True)
def sketchy_figures(monkeypatch, request) -> None:
    """Figures that are not drawn, for that takes longer than all the rest."""
    if request.node.name != "test_what_is_left":
        monkeypatch.setattr("joma.report.figures.rendered", lambda *_, **__: b"a picture")


def records(*arguments: str) -> list[dict]:
    result = joma("probe", *arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


class TestNumbers:
    def test_against_attention_matrices_and_singular_values(self, model: str):
        """Everything anew with transformers alone, in float64."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        found = records(model, "--text", "text.txt", "--window", "32", "--windows", "5")
        assert {tuple(record) for record in found} == {
            ("metric", "module", "layer", "head", "value", "bound", "kind")
        }
        eager = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager").double()
        tokens = AutoTokenizer.from_pretrained(model)(TEXT)["input_ids"][: 5 * 32]
        with torch.no_grad():
            windows = torch.tensor(tokens).reshape(5, 32)
            attentions = eager(windows, output_attentions=True).attentions
        for layer, weights in enumerate(attentions):
            entropy = torch.special.entr(weights).sum(-1)
            expected = {None: entropy.mean(), **dict(enumerate(entropy.mean((0, 2))))}
            got = {
                record["head"]: record["value"]
                for record in found
                if record["metric"] == "attention_entropy" and record["layer"] == layer
            }
            assert list(got) == [None, *range(HEADS)]
            for head, value in expected.items():
                assert got[head] == pytest.approx(float(value), abs=1e-4)
        ranks = {r["module"]: r for r in found if r["metric"] == "stable_rank"}
        assert len(ranks) == 1 + 7 * LAYERS
        for module, record in ranks.items():
            values = torch.linalg.svdvals(eager.get_parameter(f"{module}.weight").detach())
            true = float(values.square().sum() / values[0] ** 2)
            assert abs(record["value"] - true) <= record["bound"] + 1e-9 * true

    def test_defaults_and_on_request(self, model: str):
        usual = {r["metric"] for r in records(model, "--text", "text.txt")}
        assert usual == {
            "attention_entropy",
            "attention_first",
            "mlp_inactive",
            "residual_overlap",
            "embedding_overlap",
            "stable_rank",
        }
        asked = records(model, "--text", "text.txt", "--metrics", "mlp_dead, attention_last")
        assert {r["metric"] for r in asked} == {"mlp_dead", "attention_last"}

    def test_low_memory_reads_weights_alone(self, model: str, monkeypatch):
        whole = records(model, "--text", "text.txt", "--metrics", "stable_rank,embedding_overlap")

        def never(*_, **__):
            raise AssertionError("a model was built")

        monkeypatch.setattr("joma.analysis.probing.load", never)
        monkeypatch.setattr("joma.data.text.read_text", never)
        Path(model, "tokenizer.json").unlink()
        assert records(model, "--low-memory") == sorted(
            whole, key=lambda r: r["metric"] == "stable_rank"
        )


class TestRunFolder:
    def test_what_is_left(self, model: str):
        result = joma("probe", model, "--text", "text.txt", "--out", "here")
        assert result.exit_code == 0, result.stderr
        run = Run.open("here")
        assert run.config["name"] == "probe"
        assert run.config["model"] == "model"
        assert run.config["text"] == "text.txt"
        assert [path.name for path in run.figures] == ["probe.png", "probe.svg"]
        log = run.metrics.read("attention_entropy")
        assert len(log["value"]) == LAYERS * (1 + HEADS)
        assert run.read_json("outcome")["status"] == "done"
        heads = [value for value, head in zip(log["value"], log["head"], strict=True) if head >= 0]
        assert f"{min(heads[:HEADS]):.2f} … {max(heads[:HEADS]):.2f}" in result.stdout
        ranks = run.metrics.read("stable_rank")
        assert not any(math.isnan(bound) for bound in ranks["bound"])
        for words in ("entropy", "rank MLP lower", "model.embed_tokens: embedding overlap"):
            assert words in result.stdout
        assert "here/figures/probe.png" in result.stdout

    def test_dry_run_leaves_nothing(self, model: str):
        result = joma("probe", model, "--dry-run")
        assert result.exit_code == 0, result.stderr
        assert re.search(r"  about: \d+ s\n  memory about: ", result.stdout)
        plan = json.loads(joma("probe", model, "--dry-run", "--json", "--low-memory").stdout)
        assert plan["tokens"] == 0
        assert plan["metrics"] == ["embedding_overlap", "stable_rank"]
        assert not Path("runs").exists()


class TestShortTexts:
    def test_are_read_whole_with_a_note(self, model: str):
        Path("short.txt").write_text("the cat runs and then sleeps")
        result = joma("probe", model, "--text", "short.txt", "--json")
        assert result.exit_code == 0
        assert "The text has 6 tokens, less than a window of 64: it is read whole." in result.stderr
        first = json.loads(result.stdout)[0]
        assert 0 < first["value"] < math.log(6)

    @pytest.mark.parametrize("content", [b"", b"  \n", b"\xff\xfe\xff"])
    def test_no_text(self, model: str, content: bytes):
        Path("none.txt").write_bytes(content)
        assert "none.txt" in sentence(joma("probe", model, "--text", "none.txt"))
        assert not Path("runs").exists()


_MEASURED = [["--text", "text.txt"], ["--low-memory"]]
MEASURED = pytest.mark.parametrize("how", _MEASURED)
HOW = pytest.mark.parametrize("how", [*_MEASURED, *([*it, "--dry-run"] for it in _MEASURED)])


class TestDamage:
    def refused(self, *arguments: str) -> str:
        message = sentence(joma("probe", *arguments))
        assert not Path("runs").exists()  # nothing was measured
        return message

    @pytest.mark.parametrize("plan", [[], ["--dry-run"]])
    def test_another_models_tokenizer(self, model: str, plan: list[str]):
        make_tokenizer(Path("other"), above=500)
        message = self.refused(model, "--text", "text.txt", "--tokenizer", "other", *plan)
        assert "the tokenizer is not that of model" in message
        assert f"embeddings for {len(WORDS) + 1}" in message

    @HOW
    def test_a_pickle_that_wants_to_run_is_not_run(self, model: str, how: list[str]):
        Path(model, "model.safetensors").unlink()
        Path(model, "pytorch_model.bin").write_bytes(pickle.dumps(_Poison()))
        message = self.refused(model, *how)
        assert "pytorch_model.bin" in message
        assert not Path("it-ran").exists()

    @HOW
    @pytest.mark.parametrize("left", [0, 7, 100, -1])
    def test_cut_short(self, model: str, left: int, how: list[str]):
        path = Path(model, "model.safetensors")
        path.write_bytes(path.read_bytes()[:left])
        assert "model/model.safetensors" in self.refused(model, *how)

    @MEASURED
    def test_not_finite(self, model: str, how: list[str]):
        from safetensors.torch import load_file, save_file

        path = Path(model, "model.safetensors")
        weights = load_file(path)
        weights["model.layers.1.mlp.gate_proj.weight"][0, 0] = math.nan
        save_file(weights, path)
        said = self.refused(model, *how)
        assert "model.layers.1.mlp.gate_proj" in said
        assert "finite" in said or "NaN" in said

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("", "say what to measure"),
            ("nowhere/at/all", "nowhere/at/all is neither a folder nor a hub id"),
            ("model --metrics loss", "--metrics must be among attention_entropy"),
            ("model --metrics ,", "--metrics must be a list of"),
            ("model --low-memory --metrics attention_entropy", "--metrics must be among"),
            ("model --window 0", "whole number from 1 on"),
            ("model --dtype int8", "float32, float16, bfloat16"),
            ("model --text nowhere.txt", "nowhere.txt"),
            ("model --window 65", "--window must be at most 64"),
            ("model --map nowhere.json", "nowhere.json cannot be read"),
            ("model --map text.txt", "must be a .json or .toml file, got text.txt"),
            ("model --out model", "--out model has other things in it"),
        ],
    )
    def test_bad_input(self, model: str, line: str, message: str):
        assert message in self.refused(*line.split())
        assert message in self.refused(*line.split(), "--dry-run")

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("--low-memory --text text.txt", "--text has no effect with --low-memory"),
            ("--low-memory --text embedded", "--text has no effect with --low-memory"),
            ("--low-memory --windows 20", "--windows has no effect"),
            ("--low-memory --window 8 --windows 2", "--window and --windows have no effect"),
            (
                "--low-memory --tokenizer bytes --dtype float32 --text -",
                "--tokenizer, --text and --dtype have no effect",
            ),
            ("--jobs 1", "--jobs has no effect without --series"),
        ],
    )
    def test_options_that_change_nothing_are_reported(self, model: str, line: str, message: str):
        result = joma("probe", model, "--dry-run", *line.split())
        assert result.exit_code == 0
        assert message in result.stderr


MAP = """
embedding = "embeddings.weight"
query = "layers.{layer}.mixer.in_proj.weight"
key = "layers.{layer}.mixer.in_proj.weight"
mlp_lower = "layers.{layer}.mixer.x_proj.weight"
layer = "layers.{layer}"
attention = "layers.{layer}.mixer"
mlp_down = "layers.{layer}.mixer.out_proj"
prefixes = ["backbone."]
heads = 1
"""


class TestOtherModels:
    """What is measured of a model nobody wrote a map for, and of one without attention."""

    @pytest.fixture
    def mamba(self) -> str:
        from transformers import MambaConfig, MambaForCausalLM

        config = MambaConfig(vocab_size=11, hidden_size=16, state_size=4, num_hidden_layers=2)
        MambaForCausalLM(config).save_pretrained("mamba")
        make_tokenizer(Path("mamba"))
        Path("text.txt").write_text(TEXT)
        return "mamba"

    def test_no_attention(self, mamba: str):
        message = sentence(joma("probe", mamba, "--text", "text.txt"))
        assert "no attention of MambaForCausalLM was seen" in message

    @pytest.mark.parametrize("plan", [[], ["--dry-run"]])
    @pytest.mark.parametrize("how", [["--metrics", "mlp_dead"], ["--metrics", "mlp_inactive"]])
    def test_a_metric_without_its_parts(self, mamba: str, how: list[str], plan: list[str]):
        result = joma("probe", mamba, "--text", "text.txt", *how, *plan)
        assert result.exit_code == 2
        assert f"{how[1]} cannot be measured: no part of MambaForCausalLM" in result.stderr
        assert "backbone.layers.{layer}.mixer.x_proj.weight" in result.stderr
        assert "--map" in result.stderr

    def test_a_map(self, mamba: str):
        Path("map.toml").write_text(MAP)
        bare = records(mamba, "--low-memory", "--metrics", "stable_rank")
        assert [record["module"] for record in bare] == ["backbone.embeddings"]
        found = records(mamba, "--low-memory", "--metrics", "stable_rank", "--map", "map.toml")
        modules = {record["module"] for record in found}
        assert "backbone.layers.1.mixer.x_proj" in modules
        assert len(modules) == 1 + 3 * 2
        assert joma("probe", mamba, "--low-memory", "--map", "map.toml", "--dry-run").exit_code == 0


class _Poison:
    def __reduce__(self):
        return os.system, ("touch it-ran",)


@pytest.mark.skipif("JOMA_MODELS" not in os.environ, reason="JOMA_MODELS names no real models")
@pytest.mark.parametrize("name", ["stories15M.bin", "llama2.data"])
def test_a_real_model(name: str):
    path = min(Path(os.environ["JOMA_MODELS"]).rglob(name))
    found = records(str(path), "--windows", "1", "--window", "128")
    heads = [r for r in found if r["metric"] == "attention_entropy" and r["head"] is not None]
    assert len(heads) == 36
    assert all(0 < r["value"] < math.log(128) for r in heads)
