"""Nothing that a file or a user wrote acts on the terminal, or ends in an error of encoding."""

import json

import pytest
from safetensors.torch import load_file, save_file

from tests.cli._command import joma
from tests.models.tiny import tiny

ESCAPES = "\x1b[2J\x1b]0;title\x07\x9b31m\u202e"


def test_a_tensors_name_does_not_reach_the_terminal(tmp_path):
    folder = tmp_path / "model"
    tiny("llama").save_pretrained(folder)
    path = folder / "model.safetensors"
    state = load_file(path)
    state[f"model.layers.0.{ESCAPES}.weight"] = state["model.norm.weight"].clone()
    save_file(state, path, metadata={"format": "pt"})
    ended = joma("probe", str(folder), "--tokenizer", "bytes")
    assert ended.exit_code == 2
    assert "does not mention" in ended.stderr
    assert not {"\x1b", "\x07", "\x9b"} & set(ended.output)


def test_a_shape_of_many_axes_is_shortened(tmp_path):
    folder = tmp_path / "model"
    tiny("llama").save_pretrained(folder)
    path = folder / "model.safetensors"
    state = load_file(path)
    state["model.norm.weight"] = state["model.norm.weight"].reshape([1] * 60 + [-1])
    save_file(state, path, metadata={"format": "pt"})
    ended = joma("probe", str(folder), "--tokenizer", "bytes")
    assert ended.exit_code == 2
    assert len(ended.stderr) < 700
    assert "more than 8 axes" in ended.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["probe", "\udcff\x1b[2J"],
        ["probe", "\udcff", "--dry-run"],
        ["series", "verify", "\udcff"],
        ["runs", "show", "\udcff"],
        ["probe", "model", "--text", "\udcff"],
    ],
)
def test_names_that_are_no_text_are_named(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _check_named(joma(*words))


def _check_named(ended):
    assert ended.exit_code == 2
    assert "surrogates" not in ended.stderr
    assert "\x1b" not in ended.stderr
    assert "udcff" in ended.stderr


@pytest.mark.parametrize("name", ["nope", "no/such-model", "./nope"])
def test_a_model_that_is_not_there_is_refused_by_a_dry_run(name, tmp_path, monkeypatch):
    import huggingface_hub

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    dry, wet = (joma("probe", name, *more) for more in (["--dry-run"], []))
    assert (dry.exit_code, wet.exit_code) == (2, 2)
    assert dry.stderr == wet.stderr
    assert "nope" in dry.stderr or "no/such-model" in dry.stderr


def test_a_dry_run_refuses_what_the_run_refuses(tmp_path):
    folder = tmp_path / "model"
    tiny("llama").save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for change, message in (
        ({"intermediate_size": 41}, "should have"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers above"),
        ({"model_type": "nobody"}, "transformers knows"),
        ({}, "has no tokenizer"),
    ):
        path.write_text(json.dumps(config | change))
        for more in (["--dry-run"], []):
            ended = joma("probe", str(folder), *more)
            assert ended.exit_code == 2
            assert message in ended.stderr
