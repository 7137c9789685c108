"""`joma memory`: what it prints, its JSON, and what it refuses."""

import json

import pytest

pytest.importorskip("transformers", reason="needs transformers")

from joma.models.blank import PRESETS
from joma.train.memory import OPTIMIZERS, PARTS
from tests.cli._command import joma, sentence, unwrapped

SMALL = ("--batch", "2", "--window", "64", "--rank", "24")


@pytest.fixture
def llama(tmp_path):
    from transformers import LlamaConfig

    LlamaConfig(
        hidden_size=96,
        intermediate_size=272,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=1000,
        tie_word_embeddings=False,
    ).save_pretrained(tmp_path)
    return str(tmp_path)


def answer(*arguments):
    result = joma("memory", *arguments, "--json")
    assert result.exit_code == 0
    return json.loads(result.stdout)


def test_the_help_names_what_there_is():
    text = joma("memory", "--help").stdout
    assert all(name in text for name in (*PRESETS, *OPTIMIZERS))


def test_json(llama):
    found = answer(llama, *SMALL, "--optimizer", "galore-adamw", "--bits", "8", "--per-layer")
    assert list(found)[:2] == ["total_gib", "parts"]
    assert list(found["parts"]) == list(PARTS)
    assert sum(found["parts"].values()) == pytest.approx(found["total_gib"])
    assert found["fits"] is None
    assert found["card_gib"] is None
    assert found["projected"] == 14
    assert list(found["optimizers"]) == list(OPTIMIZERS)
    for name, one in found["optimizers"].items():
        assert one["optimizer"] == name
        assert one["total_gib"] == max(one["peaks_gib"].values())
    assert found["optimizers"]["adamw"]["states_less_than_adamw"] == 0
    assert found["states_less_than_adamw"] > 0.3


def test_the_optimizer_that_is_asked_for_is_the_answer(llama):
    found = answer(llama, *SMALL, "--optimizer", "sgd", "--card", "24")
    assert found["total_gib"] == found["optimizers"]["sgd"]["total_gib"]
    assert found["optimizer"] == "sgd"
    assert found["fits"] is True
    assert found["card_gib"] == 24


def test_settings_change_what_they_name(llama):
    parts = answer(llama, *SMALL)["parts"]
    eight = answer(llama, *SMALL, "--bits", "8", "--projector-bits", "8")["parts"]
    assert eight["states"] < 0.6 * parts["states"]
    assert eight["projectors"] < 0.6 * parts["projectors"]
    parts = answer(llama, *SMALL, "--optimizer", "adamw")["parts"]
    larger = answer(llama, *SMALL, "--optimizer", "adamw", "--dtype", "fp32", "--batch", "4")[
        "parts"
    ]
    assert larger["weights"] == pytest.approx(2 * parts["weights"], rel=1e-3)
    assert larger["logits"] == pytest.approx(2 * parts["logits"], rel=1e-3)


def test_the_table_says_what_fits(llama):
    result = joma("memory", llama, *SMALL, "--card", "rtx-4090")
    assert result.exit_code == 0
    for words in (*PARTS, *OPTIMIZERS, "total", "fits 24 GiB", "14 matrices projected"):
        assert words in unwrapped(result.stdout)
    assert "galore-adamw fits: 0." in result.stdout
    too_small = joma("memory", llama, *SMALL, "--card", "0.01", "--optimizer", "lora")
    assert "lora does not fit: 0." in too_small.stdout


def test_a_rank_above_all_matrices_leaves_the_other_optimizers(llama):
    wide = ("--window", "64", "--rank", "500", "--optimizer", "adamw", "--device", "cpu")
    result = joma("memory", llama, *wide)
    said = unwrapped(result.stdout)
    assert "galore-adamw" not in said
    assert "parameters in bf16 on the CPU" in said
    assert "GaLore is left out: it projects nothing at rank 500." in said
    assert "no matrices projected" in said


def test_the_table_fits_80_columns(llama, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = joma("memory", llama, *SMALL, "--card", "rtx-4090").stdout.splitlines()
    table = lines[: next(at for at, line in enumerate(lines) if line.startswith(str(llama)[:20]))]
    assert len(table) == 2 + len(PARTS) + 4  # no label is broken into two lines
    assert max(map(len, table)) <= 80


def test_what_is_refused(llama, tmp_path):
    (tmp_path / "empty").mkdir()
    for arguments, words in (
        (["no such model"], "neither a folder nor a hub id"),
        ([str(tmp_path / "empty")], "has no config.json"),
        ([llama, "--rank", "96"], "the rank must be below the shorter side of a matrix"),
        ([llama, "--card", "voodoo"], "card must be a number of GiB or one of rtx-3060"),
        ([llama, "--optimizer", "lion"], "adamw, adamw-8bit, sgd, lora, galore-adamw"),
        ([llama, "--bits", "4"], "8, 16 or 32"),
        ([llama, "--bits", "32"], "--bits must be 8 or 16 with --dtype bf16, got 32"),
        ([llama, "--window", "4096"], "window must be at most 2048"),
        ([llama, "--rank", "96", "--window", "4096", "--optimizer", "sgd"], "at most 2048"),
        ([llama, "--device", "tpu"], "cuda, cpu"),
    ):
        assert words in sentence(joma("memory", *arguments))
