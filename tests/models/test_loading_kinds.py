"""Folders of models of any kind that transformers knows, with or without a map of their weights."""

import json
from typing import Any

import pytest
import torch
import transformers as tr

from joma.errors import JomaError
from joma.models import load
from joma.models.loading import check_source, class_of
from tests.models.tiny import tiny

Settings = dict[str, Any]
_STACK: Settings = {"encoder_layers": 2, "decoder_layers": 2, "d_model": 24}
_STACK |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
_STACK |= {"encoder_ffn_dim": 40, "decoder_ffn_dim": 40}
_TOKENS: Settings = {"vocab_size": 61, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
_TOWER: Settings = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
_TOWER |= {"num_attention_heads": 4}
_IMAGE: Settings = {**_TOWER, "image_size": 16, "patch_size": 8}
_T5: Settings = {"vocab_size": 61, "d_model": 24, "d_kv": 6, "d_ff": 40, "num_layers": 2}
_T5 |= {"num_heads": 4}
_LABELS: Settings = {"num_labels": 3}

MODELS = {
    "t5": lambda: tr.T5ForConditionalGeneration(tr.T5Config(**_T5)),
    "t5 encoder": lambda: tr.T5EncoderModel(tr.T5Config(**_T5)),
    "bart": lambda: tr.BartForConditionalGeneration(tr.BartConfig(**_STACK, **_TOKENS)),
    "whisper": lambda: tr.WhisperForConditionalGeneration(
        tr.WhisperConfig(
            **_STACK, **_TOKENS, max_source_positions=30, max_target_positions=32, num_mel_bins=8
        )
    ),
    "clip": lambda: tr.CLIPModel(
        tr.CLIPConfig(text_config={**_TOWER, **_TOKENS}, vision_config=_IMAGE, projection_dim=16)
    ),
    "vit": lambda: tr.ViTForImageClassification(tr.ViTConfig(**_IMAGE, **_LABELS)),
    "albert": lambda: tr.AlbertForMaskedLM(tr.AlbertConfig(**_TOWER, **_TOKENS, embedding_size=12)),
    "mixtral": lambda: tr.MixtralForCausalLM(
        tr.MixtralConfig(**_TOWER, **_TOKENS, num_key_value_heads=2, num_local_experts=3)
    ),
    "bloom": lambda: tr.BloomForCausalLM(
        tr.BloomConfig(hidden_size=24, n_layer=2, n_head=4, **_TOKENS)
    ),
    "mamba": lambda: tr.MambaForCausalLM(
        tr.MambaConfig(hidden_size=24, num_hidden_layers=2, state_size=4, **_TOKENS)
    ),
}
TEXTLESS = {"clip", "vit"}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_any_kind_comes_back(tmp_path, name):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MODELS[name]()
    model.save_pretrained(tmp_path)
    check_source(tmp_path, reads_text=False)
    loaded = load(tmp_path)
    assert type(loaded.model) is type(model)
    stored = dict(loaded.model.named_parameters())
    assert stored.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(stored[key], value) for key, value in model.named_parameters())
    if name in TEXTLESS:
        with pytest.raises(JomaError, match="no embeddings of tokens"):
            _ = loaded.vocabulary
    else:
        assert loaded.vocabulary == 61


def test_a_part_of_a_larger_checkpoint_is_whole(tmp_path):
    """An encoder class loads from the files of encoder and decoder."""
    MODELS["t5"]().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"architectures": ["T5EncoderModel"]})
    )
    assert type(load(tmp_path).model) is tr.T5EncoderModel


def test_more_blocks_than_the_configuration_tells_of(tmp_path):
    MODELS["t5"]().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_layers": 1}))
    with pytest.raises(JomaError, match=r"does not mention: encoder\.block\.1"):
        load(tmp_path)


@pytest.mark.parametrize(
    "named", [[["x"]], [None], [{}], [3], "x", ["os"], ["\x1b[2J"], ["Mapping"]]
)
def test_odd_names_of_classes_give_the_base_model(named):
    config = tr.LlamaConfig()
    config.architectures = named
    assert class_of(config) is tr.LlamaModel


def test_a_configuration_without_a_model_is_named():
    class Lonely(tr.PreTrainedConfig):
        model_type = "lonely"

    with pytest.raises(JomaError, match="no model for the model_type 'lonely'"):
        class_of(Lonely())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 10**9}, r"num_hidden_layers above 2048, got 1000000000"),
        ({"num_labels": 10**9}, "num_labels above"),
        ({"hidden_size": 2**20}, r"has shape \(61, 24\) and should have \(61, 1048576\)"),
        ({"intermediate_size": 2**40}, r"should have \(1099511627776, 24\)"),
    ],
)
def test_what_a_configuration_asks_for_is_compared_before_it_is_built(
    tmp_path, monkeypatch, change, message
):
    tiny("llama").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    monkeypatch.setattr(tr.LlamaForCausalLM, "from_pretrained", _never)
    with pytest.raises(JomaError, match=message):
        load(tmp_path)
    with pytest.raises(JomaError, match=message):
        check_source(tmp_path, reads_text=False)


def _never(*arguments, **options):
    raise AssertionError("the model was built")


def test_names_of_classes_are_no_settings(tmp_path):
    tiny("llama").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    labels = {"label2id": {"landing stage": 9000}, "id2label": {"9000": "x"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | labels))
    load(tmp_path)


def test_checksums_of_another_form_are_somebody_elses(tmp_path):
    from joma.models.checksums import SUMS, check_checksums

    (tmp_path / SUMS).write_text("".join(f"{'0' * 64} *{name}\n" for name in ("a", "b/c")))
    assert check_checksums(tmp_path) is False
