import json
import pickle
import shutil
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from joma.errors import JomaError
from joma.models import (
    WeightFiles,
    check_tokens,
    find_stored_weights,
    find_weights,
    load,
    load_tokenizer,
    untrained,
)
from joma.models.hub import model_files
from joma.models.loading import check_source, class_of
from tests.architectures._models import build
from tests.models.test_weight_files import Trap
from tests.models.tiny import CASES, CONTEXT, VOCABULARY, tiny, tokens, word_tokenizer

WORDS = ["<unk>", "once", "upon", "a", "time"]


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def _save_tokenizer(folder, words=WORDS):
    word_tokenizer(words).save_pretrained(folder)


@pytest.fixture
def folder(tmp_path):
    tiny("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def _change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _change_weights(folder, change):
    path = folder / "model.safetensors"
    state = load_file(path)
    change(state)
    save_file(state, path, metadata={"format": "pt"})


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("part", ["whole", "base"])
def test_a_saved_model_comes_back(tmp_path, name, part, capfd):
    model = tiny(name)
    model = model if part == "whole" else model.base_model
    model.save_pretrained(tmp_path)
    capfd.readouterr()
    loaded = load(tmp_path)
    assert capfd.readouterr() == ("", "")
    assert type(loaded.model) is type(model)
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert loaded.context == CONTEXT
    assert loaded.vocabulary == VOCABULARY
    assert loaded.source == str(tmp_path)
    with torch.no_grad():
        assert torch.equal(loaded.model(tokens())[0], model(tokens())[0])
    stored = WeightFiles(tmp_path)
    for weight in find_stored_weights(stored).weights:
        assert torch.equal(stored.read(weight.name), loaded.model.get_parameter(weight.name))


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_the_hubs_layout_without_a_prefix(tmp_path, name):
    """GPT-2 and OPT-350M are on the hub with the base model's names and a class with a head."""
    model = tiny(name)
    model.base_model.save_pretrained(tmp_path)
    _change_config(tmp_path, architectures=[type(model).__name__])
    loaded = load(tmp_path)
    with torch.no_grad():
        assert torch.equal(loaded.model(tokens())[0], model(tokens())[0])
    assert len(find_stored_weights(WeightFiles(tmp_path)).weights) == 1 + 6 * 3


def test_pytorch_files_load_and_payloads_do_not(tmp_path, folder):
    model = tiny("llama")
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    with torch.no_grad():
        assert torch.equal(load(folder).model(tokens()).logits, model(tokens()).logits)
    torch.save(model.state_dict() | {"x": Trap(tmp_path / "caught")}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin.*refused"):
        load(folder)
    assert not (tmp_path / "caught").exists()


def test_files_next_to_the_weights_are_not_unpickled(tmp_path, folder):
    """Layouts that transformers knows and that hold pickles: they are not opened."""
    poison = pickle.dumps(Trap(tmp_path / "caught"))
    for name in (".metadata", "__0_0.distcp", "training_args.bin", "adapter_model.bin"):
        (folder / name).write_bytes(poison)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    load(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="has no weights"):
        load(folder)
    assert not (tmp_path / "caught").exists()


def test_no_weight_is_made_up(folder):
    lower = "model.layers.1.mlp.gate_proj.weight"
    _change_weights(folder, lambda state: state.pop(lower))
    with pytest.raises(ValueError, match=f"lacks {lower} of a LlamaForCausalLM"):
        load(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 2}, r"does not mention: model\.layers\.2.* and \d+ more"),
        ({"intermediate_size": 41}, r"has shape \(\d+, \d+\) and should have"),
        ({"model_type": "nobody"}, "transformers knows, got 'nobody'"),
        ({"hidden_size": "wide"}, "config.json cannot be used"),
        ({"quantization_config": {}}, "holds quantized weights"),
    ],
)
def test_configurations_that_cannot_be_used(folder, changes, message):
    _change_config(folder, **changes)
    with pytest.raises(ValueError, match=message) as refused:
        load(folder)
    assert "\n" not in str(refused.value)


def test_a_head_for_another_task_does_no_harm(tmp_path):
    with torch.random.fork_rng(devices=[]):
        model = transformers.BertForPreTraining(tiny("bert").config)
    model.save_pretrained(tmp_path)
    _change_config(tmp_path, architectures=["BertForMaskedLM"])
    assert type(load(tmp_path).model) is transformers.BertForMaskedLM


def test_an_encoder_without_its_pooler_is_whole(tmp_path):
    tiny("bert").base_model.save_pretrained(tmp_path)
    assert "pooler" not in dict(load(tmp_path).model.named_children())
    _change_weights(tmp_path, lambda state: state.pop("embeddings.word_embeddings.weight"))
    with pytest.raises(ValueError, match=r"lacks embeddings\.word_embeddings\.weight"):
        load(tmp_path)


def test_code_in_a_folder_is_not_run(tmp_path, folder):
    _change_config(folder, auto_map={"AutoConfig": "own.Own", "AutoModel": "own.Own"})
    (folder / "own.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'caught')!r})\n")
    _save_tokenizer(folder)
    options = folder / "tokenizer_config.json"
    own = {"auto_map": {"AutoTokenizer": ["own.Own", None]}}
    options.write_text(json.dumps(json.loads(options.read_text()) | own))
    assert type(load(folder).model) is transformers.LlamaForCausalLM
    assert not (tmp_path / "caught").exists()


def test_sources_that_are_none(tmp_path, folder):
    with pytest.raises(ValueError, match=r"no config\.json"):
        load(tmp_path)
    with pytest.raises(ValueError, match=r"give the folder it is in"):
        load(folder / "model.safetensors")
    torch.save({"a": torch.zeros(1)}, tmp_path / "weights.pt")
    with pytest.raises(ValueError, match=r"give the folder it is in"):
        load(tmp_path / "weights.pt")
    with pytest.raises(ValueError, match="neither a folder nor a hub id"):
        load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"revision goes with a hub id, got 'x' for the file"):
        load(folder / "config.json", revision="x")
    with pytest.raises(ValueError, match="cannot be asked") as refused:
        load("nobody/nothing", revision="step7")
    assert "nobody/nothing at revision step7" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_without_transformers_the_extra_is_named(monkeypatch, folder):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"needs transformers: pip install -c constraints.txt -e '\.\[hf\]'"
    ):
        load(folder)


def test_a_revision_downloaded_before_is_found(tmp_path, folder, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    kept = tmp_path / "cache" / "models--some--one"
    for commit, revision in (("a" * 40, "step1"), ("b" * 40, "step2")):
        shutil.copytree(folder, kept / "snapshots" / commit)
        (kept / "refs").mkdir(exist_ok=True)
        (kept / "refs" / revision).write_text(commit)
    norm = "model.norm.weight"
    _change_weights(kept / "snapshots" / ("b" * 40), lambda state: state[norm].fill_(7))
    first, second = (load("some/one", revision=revision) for revision in ("step1", "step2"))
    assert not torch.equal(first.model.get_parameter(norm), second.model.get_parameter(norm))
    assert torch.equal(second.model.get_parameter(norm), torch.full((24,), 7.0))
    assert second.source == "some/one"
    assert WeightFiles("some/one", revision="step2").read(norm)[0] == 7


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("GatedRepoError", "some/one at revision step1 is gated: log in"),
        ("RevisionNotFoundError", "some/one has no revision 'step1'"),
        ("RepositoryNotFoundError", "no model on the Hugging Face hub is named some/one"),
        ("HfHubHTTPError", r"cannot be asked \(it said no\)"),
    ],
)
def test_what_the_hub_answers_is_reported(tmp_path, monkeypatch, kind, message):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))

    def answer(*arguments, **options):
        response = SimpleNamespace(headers={}, request=None)
        raise getattr(huggingface_hub.errors, kind)("it said no", response=response)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", answer)
    with pytest.raises(ValueError, match=message):
        load("some/one", revision="step1")


def test_weights_are_downloaded_once():
    small = ["config.json", "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt"]
    both = ["model.safetensors", "pytorch_model.bin", "tf_model.h5", "onnx/model.onnx", "README.md"]
    assert model_files([*small, *both]) == [*small, "model.safetensors"]
    shards = ["model.safetensors.index.json", "model-00001-of-00002.safetensors"]
    shards.append("model-00002-of-00002.safetensors")
    assert model_files([*both[1:], *shards]) == shards
    assert model_files(["config.json", "own.py"]) == ["config.json"]


def test_a_folders_own_tokenizer_and_another(tmp_path, folder):
    assert load(folder).tokenizer is None
    with pytest.raises(ValueError, match=r"has no tokenizer: give one with --tokenizer PATH"):
        load(folder).encode("once")
    _save_tokenizer(folder)
    loaded = load(folder)
    assert loaded.encode("once upon a mountain") == [1, 2, 3, 0]
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.decode([3, 4]) == "a time"
    assert loaded.tokenizer.size == len(WORDS)
    assert load(folder, tokenizer="bytes").encode("1") == [49]
    _save_tokenizer(tmp_path / "other", WORDS[:3])
    for other in (tmp_path / "other", tmp_path / "other" / "tokenizer.json"):
        assert load(folder, tokenizer=other).encode("once a") == [1, 0]


def test_a_tokenizer_of_another_model_is_noticed(folder):
    _save_tokenizer(folder, ["<unk>"] + [f"w{index}" for index in range(80)])
    loaded = load(folder)
    assert loaded.encode("w59") == [60]
    with pytest.raises(ValueError, match=r"not that of .*model: it gave token 61.* for 61"):
        loaded.encode("w60")
    with pytest.raises(ValueError, match="not that of the model"):
        check_tokens([3, 9], 9)
    check_tokens([], 9)
    with pytest.raises(ValueError, match="token 195"):
        load(folder, tokenizer="bytes").encode("é")


def test_tokenizers_that_are_none(tmp_path, folder):
    with pytest.raises(ValueError, match="has no tokenizer"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"cannot be read .*--tokenizer bytes"):
        load(folder)
    with pytest.raises(ValueError, match=r"tokenizer\.json is no tokenizer"):
        load_tokenizer(folder / "tokenizer.json")
    tiny("gpt2").save_pretrained(tmp_path / "gpt2")
    (tmp_path / "gpt2" / "tokenizer_config.json").write_text("{}")  # an empty one is made up of it
    with pytest.raises(ValueError, match=r"tokenizer of .*gpt2 is empty"):
        load(tmp_path / "gpt2")


@pytest.mark.parametrize("name", ["gpt2", "opt projected", "bert", "gemma3"])
def test_untrained_is_the_same_model_with_fresh_weights(tmp_path, name):
    tiny(name).save_pretrained(tmp_path)
    loaded = load(tmp_path)
    state = torch.get_rng_state()
    fresh, again, other = (untrained(loaded, seed) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), state)
    configurations = [vars(one.model)["config"].to_dict() for one in (fresh, loaded)]
    assert configurations[0] == configurations[1]
    assert not fresh.model.training
    assert fresh.tokenizer is loaded.tokenizer
    assert "untrained" in fresh.source
    for weight in find_weights(loaded.model).weights:
        first, *others = (
            one.model.get_parameter(weight.name) for one in (fresh, again, other, loaded)
        )
        assert [torch.equal(first, it) for it in others] == [True, False, False]
        assert not first.requires_grad


@pytest.mark.parametrize(
    "name", ["t5", "bart", "whisper", "clip", "vit", "albert", "mixtral", "bloom", "mamba"]
)
def test_a_model_of_any_kind_comes_back(tmp_path, name):
    model = build(name)
    model.save_pretrained(tmp_path)
    check_source(tmp_path, reads_text=False)
    loaded = load(tmp_path)
    assert type(loaded.model) is type(model)
    stored = dict(loaded.model.named_parameters())
    assert stored.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(stored[key], value) for key, value in model.named_parameters())
    if name in ("clip", "vit"):
        with pytest.raises(JomaError, match="no embeddings of tokens"):
            _ = loaded.vocabulary
    else:
        assert loaded.vocabulary == 99


def test_a_part_of_a_larger_checkpoint_is_whole(tmp_path):
    """An encoder class loads from the files of encoder and decoder."""
    build("t5").save_pretrained(tmp_path)
    _change_config(tmp_path, architectures=["T5EncoderModel"])
    assert type(load(tmp_path).model) is transformers.T5EncoderModel


@pytest.mark.parametrize("named", [[["x"]], [None], "x", ["os"], ["\x1b[2J"]])
def test_odd_names_of_classes_give_the_base_model(named):
    config = transformers.LlamaConfig()
    config.architectures = named
    assert class_of(config) is transformers.LlamaModel


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 10**9}, r"num_hidden_layers above 2048, got 1000000000"),
        ({"num_labels": 10**9}, "num_labels above"),
        ({"intermediate_size": 2**40}, r"should have \(1099511627776, 24\)"),
    ],
)
def test_what_a_configuration_asks_for_is_compared_before_it_is_built(
    folder, monkeypatch, change, message
):
    def never(*arguments, **options):
        raise AssertionError("the model was built")

    _change_config(folder, **change)
    monkeypatch.setattr(transformers.LlamaForCausalLM, "from_pretrained", never)
    for call in (load, lambda folder: check_source(folder, reads_text=False)):
        with pytest.raises(JomaError, match=message):
            call(folder)


def test_names_of_classes_are_no_settings(folder):
    labels = {"label2id": {"landing stage": 9000}, "id2label": {"9000": "x"}}
    _change_config(folder, **labels)
    load(folder)
