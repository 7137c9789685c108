"""`joma superposition` on a tiny random model of bytes."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from joma.runs import Run
from tests.cli._command import joma

pytest.importorskip("transformers", reason="needs transformers")


def run(*arguments: str):
    return joma("superposition", *map(str, arguments))


def refused(*arguments: str) -> str:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("joma: ")]
    return line


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=16,
        intermediate_size=110,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=40,
    )
    folder = tmp_path_factory.mktemp("tiny") / "model"
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    words = ["in", "the", "beginning", "was", "a", "word,", "then", "another", "[one]", "*of*\n"]
    chosen = random.Random(0).choices(words, k=900)
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join(chosen), encoding="utf-8")
    return str(path)


@pytest.fixture
def no_pictures(monkeypatch):
    """Pictures take most of the time; one test checks them."""
    monkeypatch.setattr("joma.report.figures.save", lambda *args, **options: [])


@pytest.fixture
def small(model, text) -> list[str]:
    return [model, "--tokenizer", "bytes", "--text", text, "--window", "20", "--windows", "80"]


def test_nodes_are_printed_with_their_contexts_and_kept(small, tmp_path):
    result = run(*small, "--out", str(tmp_path / "out"))
    assert result.exit_code == 0
    assert "layer 0" in result.stdout or "layer 1" in result.stdout
    assert "A attends to" in result.stdout
    assert "«" in result.stdout  # not a terminal, so attended tokens are marked
    assert "where 1% would by chance" in " ".join(result.stdout.split())
    kept = Run.open(tmp_path / "out")
    assert kept.name == "superposition"
    assert kept.config["windows"] == 80
    assert kept.tables == ["contexts", "controls", "layers", "nodes"]
    assert [path.name for path in kept.figures] == [
        "contexts.png",
        "contexts.svg",
        "scores.png",
        "scores.svg",
    ]
    assert len(kept.read_table("nodes")["score"]) > 150
    assert kept.read_json("outcome")["status"] == "done"
    assert kept.read_json("outcome")["finding"] in kept.read_json("summary")["finding"]


def test_json_has_what_the_tables_have(small, no_pictures, tmp_path):
    result = run(*small, "--json", "--layers", "1", "--out", str(tmp_path / "out"))
    assert result.exit_code == 0
    record = json.loads(result.stdout)
    assert [row["layer"] for row in record["layers"]] == [1]
    assert record["window"] == 20
    assert isinstance(record["beats_shuffled"], bool)
    node = record["found"][0]
    nodes = Run.open(record["run"]).read_table("nodes")
    own = nodes["node"] == node["node"]
    assert nodes["score"][own] == pytest.approx(node["score"])
    assert nodes["p_shuffled"][own] == pytest.approx(node["p_shuffled"])
    for group in node["groups"]:
        for context in group["contexts"]:
            assert len(context["pieces"]) == len(context["attention"]) == len(context["attended"])


def test_the_same_seed_gives_the_same(small, no_pictures, tmp_path):
    once = ["--json", "--layers", "0"]
    first, again, other = (
        json.loads(run(*small, *once, "--seed", seed, "--out", str(tmp_path / name)).stdout)
        for name, seed in (("a", "1"), ("b", "1"), ("c", "2"))
    )
    assert first["found"] == again["found"]
    assert first["layers"] == again["layers"] != other["layers"]


def test_dry_run_writes_nothing(small, tmp_path):
    result = run(*small, "--dry-run", "--out", str(tmp_path / "out"))
    assert result.exit_code == 0
    assert "  windows: 80\n  window: 20\n  about: " in result.stdout
    assert not (tmp_path / "out").exists()
    plan = json.loads(run(*small, "--dry-run", "--json").stdout)
    assert plan["about_seconds"] > 0
    assert not Path("runs").exists()


def test_ctrl_c_says_what_is_there_and_how_to_go_on(small, tmp_path, monkeypatch):
    import joma.analysis.superposition as package

    def interrupted(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(package, "search", interrupted)
    result = run(*small, "--out", str(tmp_path / "out"))
    assert result.exit_code == 130
    assert "Incomplete" in result.stderr
    assert "Continue with: joma" in result.stderr
    assert Run.open(tmp_path / "out").read_json("outcome")["status"] == "interrupted"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (["--layers", "2"], "--layers must lie from 0 to 1, got 2"),
        (["--layers", "one"], "numbers like 0,3-5, not 'one'"),
        (["--window", "5"], "--window must be at least 9 tokens"),
        (["--window", "41"], "tokens and at most 40"),
        (["--window", "99999"], "as many tokens as the text has, got 99999"),
        (["--windows", "15"], "--windows must be at least 16"),
        (["--nodes", "20"], "from 100 on"),
        (["--text", "nowhere.txt"], "text must be a file"),
        (["--tokenizer", "nowhere"], "nowhere"),
    ],
)
def test_bad_input_gets_one_sentence(small, changes, sentence):
    assert sentence in refused(*small, *changes)
    assert not Path("runs").exists()
