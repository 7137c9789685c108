"""What a cache cannot do is said in one sentence."""

from typing import Any

import pytest
import torch
import transformers

from joma.errors import JomaError
from joma.inference import (
    Full,
    HeavyHitter,
    Random,
    Streaming,
    Window,
    cache,
    cache_bytes,
    check_supported,
    parse_policy,
)
from tests.inference.models import tiny

IDS = torch.arange(1, 13)[None]


def _any(value: object) -> Any:
    """Return a value as one that no type is checked of."""
    return value


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Window(0), "n must be a whole number from 1 on, got 0"),
        (lambda: Window(_any(2.5)), "n must be a whole number"),
        (lambda: Window(True), "n must be a whole number"),
        (lambda: Streaming(0), "window must be"),
        (lambda: Streaming(4, -1), "sinks must be a whole number from 0 on"),
        (
            lambda: Streaming(4, positions=_any("kept")),
            "positions must be one of auto, cache, absolute",
        ),
        (lambda: HeavyHitter(0, 4), "heavy must be"),
        (lambda: HeavyHitter(4, -1), "recent must be"),
        (lambda: HeavyHitter(4, 4, _any("max")), "score must be one of sum, mean, decay"),
        (lambda: HeavyHitter(4, 4, "decay", 1.5), "decay must be between 0 and 1"),
        (lambda: Random(4, recent=5), "n must be a whole number from 5 on"),
        (lambda: parse_policy("h2o"), "cache must be one of full, window:n=N"),
        (lambda: parse_policy("window"), "cache must be written window:n=N"),
        (lambda: parse_policy("window:m=3"), "cache must be written window:n=N"),
        (lambda: parse_policy("window:n=3,n=4"), "cache must be written window:n=N, got 'n=4'"),
        (lambda: parse_policy("window:n=many"), "n must be a whole number"),
    ],
)
def test_impossible_policies(make, words):
    with pytest.raises(JomaError, match=words):
        make()


@pytest.mark.parametrize(
    "policy",
    [Full(), Window(9), Streaming(8, 3), HeavyHitter(4, 5, "decay", 0.5), Random(6, 2, 9)],
)
def test_a_policy_reads_what_it_writes(policy):
    assert parse_policy(policy.spec) == policy


def test_arguments_of_the_wrong_number():
    model = tiny("llama")
    with (
        pytest.raises(JomaError, match="one for each of 3 layers, got 2"),
        cache(model, [Full()] * 2),
    ):
        pass
    with pytest.raises(JomaError, match="tokens must be"):
        cache_bytes(model, Full(), tokens=-1)


def test_a_model_that_learned_its_positions_cannot_go_beyond_them():
    model = tiny("gpt2")
    with pytest.raises(JomaError, match="whose positions are learned"):
        check_supported(model, Streaming(8, positions="cache"))
    with torch.no_grad(), cache(model, Streaming(8)) as kv:
        model(IDS.repeat(1, 5), past_key_values=kv)
        with pytest.raises(JomaError, match="reached 72 tokens, and this model has learned 64"):
            model(IDS, past_key_values=kv)


@pytest.mark.parametrize("name", ["opt", "gpt2"])
def test_generation_ends_at_the_last_learned_position(name):
    """OPT with a head passes its base model by, so that the check must stand in the decoder."""
    model = tiny(name)
    with cache(model, Window(5)) as kv:
        options = {"past_key_values": kv, "do_sample": False}
        assert model.generate(IDS, max_length=64, **options).shape[1] == 64
        kv.reset()
        with pytest.raises(JomaError, match="reached 65 tokens, and this model has learned 64"):
            model.generate(IDS, max_length=80, **options)
    with torch.no_grad(), cache(model, Full()), pytest.raises(JomaError, match="must be called"):
        model(IDS)


def test_the_cache_must_be_passed_and_used_inside():
    model = tiny("llama")
    with torch.no_grad(), cache(model, Full()) as kv:
        with pytest.raises(JomaError, match="must be called with past_key_values"):
            model(IDS)
        model(IDS, past_key_values=kv)
        with pytest.raises(JomaError, match="the cache holds 1 rows"):
            model(IDS.repeat(2, 1), past_key_values=kv)
        model(IDS, past_key_values=kv)  # what was refused has changed nothing
        kv.reset()
        model(IDS.repeat(2, 1), past_key_values=kv)


def test_a_pass_that_broke_off_is_not_continued():
    model = tiny("llama")

    def interrupt(*_):
        raise KeyboardInterrupt

    with torch.no_grad(), cache(model, Window(4)) as kv:
        hook = model.model.layers[1].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(IDS, past_key_values=kv)
        hook.remove()
        with pytest.raises(JomaError, match="did not end: call reset"):
            model(IDS, past_key_values=kv)
        kv.reset()
        model(IDS, past_key_values=kv)


def test_a_pass_that_broke_off_inside_of_the_last_layer_is_not_continued(monkeypatch):
    model = tiny("llama")

    def interrupt(*_):
        raise KeyboardInterrupt

    with torch.no_grad(), cache(model, Window(4)) as kv:
        model(IDS, past_key_values=kv)
        with monkeypatch.context() as patch:
            patch.setattr(kv.layers[-1].store, "shrink", interrupt)
            with pytest.raises(KeyboardInterrupt):
                model(IDS[:, :1], past_key_values=kv)
        with pytest.raises(JomaError, match="did not end: call reset"):
            model(IDS[:, :1], past_key_values=kv)


def test_assisted_decoding_is_refused():
    model = tiny("llama")
    with cache(model, Window(4)) as kv, pytest.raises((JomaError, ValueError), match="cache"):
        model.generate(
            IDS, past_key_values=kv, prompt_lookup_num_tokens=3, max_new_tokens=9, do_sample=False
        )


def test_masks_of_four_dimensions_and_training_are_refused():
    model = tiny("llama")
    with torch.no_grad(), cache(model, Full()) as kv:
        mask = torch.ones(1, 1, 12, 12, dtype=torch.bool).tril()
        with pytest.raises(JomaError, match="attention_mask must have two dimensions"):
            model(IDS, attention_mask=mask, past_key_values=kv)
    with pytest.raises(JomaError, match="evaluation mode"), cache(model.train(), Full()):
        pass


def small(kind, **options):
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "vocab_size": 97,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    config = transformers.AutoConfig.for_model(kind, **{**sizes, **options})
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("bloom", {"n_layer": 2, "n_head": 4}, "rotary or learned positions"),
        ("diffllama", {}, "a cache cannot follow it"),
        ("mamba", {}, "layers must attend to everything or to a sliding window"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "dynamic positions cannot use a cache",
        ),
    ],
)
def test_architectures_that_cannot_be_served(kind, options, words):
    model = small(kind, **options)
    with pytest.raises(JomaError, match=words), cache(model, Window(4)) as kv:
        model(IDS, past_key_values=kv)


def test_anything_else_is_refused():
    with pytest.raises(JomaError, match="must be a decoder of transformers"):
        check_supported(torch.nn.Linear(2, 2), Full())
    config = transformers.T5Config(d_model=16, d_kv=4, num_layers=1, num_heads=2, vocab_size=20)
    with pytest.raises(JomaError, match="an encoder with a decoder"):
        check_supported(transformers.T5ForConditionalGeneration(config), Full())


@pytest.mark.parametrize("kind", ["qwen2", "phi3", "olmo2"])
def test_a_model_the_tests_do_not_know_is_tried_first(kind):
    model = small(kind, num_key_value_heads=4)
    with torch.no_grad(), cache(model, Streaming(4, 2)) as kv:
        model(IDS, past_key_values=kv)
    assert kv.held == [6, 6]


def test_a_model_that_turns_its_keys_in_another_way_has_no_moving_sinks():
    model = small("cohere", num_key_value_heads=4)
    with pytest.raises(JomaError, match="how it rotates its keys is not known"):
        cache(model, Streaming(4, 2)).__enter__()
    with torch.no_grad(), cache(model, Streaming(4, 2, positions="absolute")) as kv:
        model(IDS, past_key_values=kv)


def test_layers_without_positions_are_found():
    model = small("smollm3", num_hidden_layers=4, num_key_value_heads=2)
    with cache(model, Streaming(4, 2)) as kv:
        rotated = [it.kind.is_rotated for it in kv.layers]
    assert rotated == [True, True, True, False]


def test_a_tried_model_of_another_type_turns_its_keys_by_its_new_frequencies():
    model = small("qwen2", num_key_value_heads=4)
    for dtype in (torch.float32, torch.bfloat16):
        with cache(model.to(dtype), Streaming(4, 2)) as kv:
            found = kv.layers[0].kind.frequencies
        assert found is model.model.rotary_emb.inv_freq


def test_a_cache_on_another_device_is_refused():
    model = tiny("llama")
    with torch.no_grad(), cache(model, Window(4)) as kv:
        model(IDS, past_key_values=kv)
        for layer in kv.layers:
            assert layer.store is not None
            layer.store.keys = layer.store.keys.to("meta")
        with pytest.raises(JomaError, match="is on meta and the model's keys are on cpu"):
            model(IDS, past_key_values=kv)


@pytest.mark.parametrize("other", ["qwen3", "opt"])
def test_a_cache_of_another_model_is_refused(other: str):
    words = "given to another model than the one it was made for"
    with cache(tiny("llama"), Window(3)) as kv, pytest.raises(JomaError, match=words):
        tiny(other)(IDS, past_key_values=kv)
