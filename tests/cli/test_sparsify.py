"""`joma sparsify` on a tiny model: a run folder, tables, the file, and bad input."""

import json
from pathlib import Path
from typing import Any

import pytest

from joma.inference.sparsify import load_predictors
from tests.cli._command import joma as command
from tests.inference.models import CONFIGS

TEXT = "".join(
    f"line {number} of a text, and {number * 7 % 13} more words\n" for number in range(200)
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama that reads bytes, and a text."""
    import torch
    import transformers

    made = tmp_path_factory.mktemp("sparsify")
    config = CONFIGS["llama"]()
    config.vocab_size = 256
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.LlamaForCausalLM(config).save_pretrained(made / "model")
    (made / "text.txt").write_text(TEXT)
    return made


def joma(*words: Any) -> Any:
    return command("sparsify", *map(str, words))


def fit(folder: Path, *words: Any) -> Any:
    options = ("--tokenizer", "bytes", "--corpus", folder / "text.txt", "--device", "cpu")
    small = ("--tokens", 1024, "--held-out-tokens", 256, "--window", 32, "--epochs", 1)
    return joma("fit", folder / "model", *options, *small, *words)


def test_fit_and_show(folder: Path) -> None:
    out = folder / "run"
    result = fit(folder, "--heads-sparsity", 0.5, "--out", out, "--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert [one["selection"] for one in record["perplexity"]] == [
        "dense",
        "predicted",
        "oracle",
        "random",
    ]
    assert len(record["layers"]) == 3
    assert record["tokens"] == 1024
    assert json.loads((out / "outcome.json").read_text())["finding"] == record["finding"]
    predictors = load_predictors(out / "predictors.safetensors")
    assert predictors.facts.rank == record["rank"] == 4
    shown = joma("show", out)
    assert shown.exit_code == 0
    assert predictors.facts.fingerprint in shown.stdout
    assert json.loads(joma("show", out, "--json").stdout)["layers"] == 3


def test_the_tables(folder: Path) -> None:
    result = fit(folder, "--out", folder / "printed")
    assert result.exit_code == 0, result.output
    for word in ("recall", "energy kept", "magnitude", "static", "± s.e.", "a layer ahead"):
        assert word in result.stdout


def test_dry_run_writes_nothing(folder: Path) -> None:
    result = fit(folder, "--dry-run", "--json", "--out", folder / "dry")
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)
    assert plan["predictor_parameters"] == 3 * 5 * (32 + 48)
    assert plan["tokens"] == 1024
    assert not (folder / "dry").exists()


def test_bad_input(folder: Path) -> None:
    for words, said in (
        (("--mlp-sparsity", 1.5), "above 0 and below 1"),
        (("--rank-ratio", 40), "--rank-ratio must be"),
        (("--held-out", folder / "text.txt"), "another text"),
    ):
        result = fit(folder, *words)
        assert result.exit_code == 2
        assert said in result.output
    (folder / "bad.safetensors").write_bytes(b"\x80\x04nothing")
    result = joma("show", folder / "bad.safetensors")
    assert "no safetensors file" in result.output
