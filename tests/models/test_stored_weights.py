"""Weights found in files by their names and shapes, against those of the loaded model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from joma.common.quiet import quietly
from joma.models import WeightFiles, find_stored_weights, find_weights
from joma.probes.session import probe_weights

transformers = pytest.importorskip("transformers")

_SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GPT2: dict[str, Any] = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4}
_SEQ2SEQ: dict[str, Any] = {
    "vocab_size": 61,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
CASES = {
    "llama": ("AutoModelForCausalLM", {**_SMALL, "num_key_value_heads": 2}),
    "gpt2": ("AutoModelForCausalLM", _GPT2),
    "gpt_bigcode": ("AutoModelForCausalLM", {**_GPT2, "multi_query": False}),
    "gpt_neox": ("AutoModelForCausalLM", _SMALL),
    "phi3": ("AutoModelForCausalLM", {**_SMALL, "num_key_value_heads": 2}),
    "falcon": (
        "AutoModelForCausalLM",
        {**_SMALL, "new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    "bert": ("AutoModelForMaskedLM", _SMALL),
    "bart": ("AutoModelForSeq2SeqLM", _SEQ2SEQ),
    "mixtral": (
        "AutoModelForCausalLM",
        {**_SMALL, "num_key_value_heads": 2, "num_local_experts": 3},
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[nn.Module, Path]]:
    made = {}
    for model_type, (auto, settings) in CASES.items():
        with torch.random.fork_rng(), quietly():
            torch.manual_seed(0)
            config = transformers.AutoConfig.for_model(model_type, **settings)
            model = getattr(transformers, auto).from_config(config).eval()
            for parameter in model.parameters():
                nn.init.normal_(parameter, std=0.3)
            folder = tmp_path_factory.mktemp(model_type)
            model.save_pretrained(folder)
        made[model_type] = model, folder
    return made


@pytest.mark.parametrize("model_type", CASES)
def test_the_same_matrices_as_in_the_model(model_type: str, folders: Any):
    model, folder = folders[model_type]
    files = WeightFiles(folder)
    _compare(model, files, find_stored_weights(files))


def _compare(model: Any, files: WeightFiles, found: Any) -> None:
    expected = find_weights(model)
    assert len(found.weights) == len(expected.weights)
    for it, own in zip(found.attentions, expected.attentions, strict=True):
        # Bart's configuration has one number for the encoder and one for the decoder.
        assert (it.heads, it.key_heads) in ((own.heads, own.key_heads), (None, None))
        assert it.heads is not None or model.config.model_type == "bart"
    left = list(expected.weights)
    for weight in found.weights:
        matrix, what = weight.matrix(files.read), (weight.role, weight.layer, weight.expert)
        same = [
            own
            for own in left
            if (own.role, own.layer, own.expert) == what and torch.equal(own.of(model), matrix)
        ]
        assert len(same) == 1, weight.module
        left.remove(same[0])
    assert not left


def test_names_without_the_prefix_of_the_model(folders: Any, tmp_path: Path):
    """As the hub has GPT-2."""
    model, folder = folders["gpt2"]
    whole = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in whole.items()}
    save_file(bare, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    found = find_stored_weights(WeightFiles(tmp_path))
    assert found.attentions[0].module == "h.0.attn"
    ranks = {it.module: it.value for it in probe_weights(WeightFiles(tmp_path))}
    own = {it.module: it.value for it in probe_weights(model)}
    assert {f"transformer.{module}": value for module, value in ranks.items()} == own


def test_hostile_names_make_no_trouble(tmp_path: Path):
    names = ["a..b", ".", "", "x." * 60 + "w", "forward.weight", "_modules.weight", "a.b", "a.b.c"]
    save_file({name: torch.ones(2, 2) for name in names}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "nobody"}')
    files = WeightFiles(tmp_path)
    assert not find_stored_weights(files).weights
    with pytest.raises(ValueError, match="stable_rank cannot be measured"):
        probe_weights(files)


def test_without_a_configuration(tmp_path: Path):
    save_file({"w": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"has no config\.json"):
        find_stored_weights(WeightFiles(tmp_path))
