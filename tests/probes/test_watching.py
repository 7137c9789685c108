import gc
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from joma.models import enable_checkpointing
from joma.probes.tap import AttentionCall, watch_attention
from joma.probes.tap.huggingface import interface_parts
from joma.probes.tap.stack import taps
from tests.probes._watched import entropy_of, sharpen

VOCABULARY = 40
LENGTH = 13


SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
GROUPED: dict[str, Any] = SIZES | {"num_key_value_heads": 2, "head_dim": 16}
OPT: dict[str, Any] = {name: size for name, size in SIZES.items() if name != "intermediate_size"}

MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=32,
            bos_token_id=0,
            eos_token_id=1,
            scale_attn_by_inverse_layer_idx=True,
        )
    ),
    "gpt_neox": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**SIZES)),
    "opt": lambda: hf.OPTForCausalLM(
        hf.OPTConfig(**OPT, ffn_dim=40, word_embed_proj_dim=32),
    ),
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**GROUPED, sliding_window=5)),
    "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**SIZES)),
    "gemma": lambda: hf.GemmaForCausalLM(hf.GemmaConfig(**GROUPED)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(
        hf.Gemma2Config(
            **GROUPED, sliding_window=5, attn_logit_softcapping=2.0, query_pre_attn_scalar=9
        )
    ),
    "gemma3": lambda: hf.Gemma3ForCausalLM(
        hf.Gemma3TextConfig(
            **GROUPED, sliding_window=5, layer_types=["sliding_attention", "full_attention"]
        )
    ),
}
ONLY_EAGER = ("gemma2",)
CASES = [
    (name, implementation)
    for name in MODELS
    for implementation in ("eager", "sdpa")
    if implementation == "eager" or name not in ONLY_EAGER
]


def hf_model(name: str, implementation: str) -> Any:
    model: Any = sharpen(MODELS[name]())
    model.set_attn_implementation(implementation)
    return model


def hf_inputs(padding: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH), generator=generator)
    mask = torch.ones_like(tokens)
    if padding == "left":
        mask[0, :4] = 0
    if padding == "right":
        mask[0, -4:] = 0
    return {"input_ids": tokens} | ({} if padding == "none" else {"attention_mask": mask})


def eager_attentions(model: Any, **inputs: Any) -> tuple[Tensor, ...]:
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return model(**inputs, output_attentions=True).attentions


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize(("name", "implementation"), CASES)
def test_hugging_face_logits_stay_and_entropies_are_those_of_eager(
    name: str, implementation: str, padding: str
):
    model, inputs = hf_model(name, implementation), hf_inputs(padding)
    calls: list[AttentionCall] = []
    with torch.no_grad():
        plain = model(**inputs).logits
        with watch_attention(model, calls.append) as watch:
            watched = model(**inputs).logits
        after = model(**inputs).logits
    assert torch.equal(watched, plain)
    assert torch.equal(after, plain)
    assert model.config._attn_implementation == implementation
    assert [call.layer for call in calls] == [0, 1]
    assert watch.calls == 2
    assert watch.modules == [call.module for call in calls]
    assert all(isinstance(model.get_submodule(call.module), nn.Module) for call in calls)
    attentions = eager_attentions(model, **inputs)
    for call, attention in zip(calls, attentions, strict=True):
        found = call.statistics(first=2, received=True)
        sees = ~found.logsumexp.isneginf()
        real = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
        assert torch.equal(sees, real[:, None].expand_as(sees))  # padding is in no mean
        torch.testing.assert_close(
            found.entropy[sees].double(), entropy_of(attention)[sees], atol=1e-5, rtol=0
        )
        assert found.first is not None
        torch.testing.assert_close(
            found.first[sees], attention[..., :2].sum(-1)[sees], atol=1e-5, rtol=0
        )
        assert found.received is not None
        assert found.received.shape == attention.shape[:2] + attention.shape[3:]
        assert found.entropy[sees].std() > 0.05


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # compiling warns of much, none of it ours
@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_flex_attention(name: str, padding: str):
    model, inputs = hf_model(name, "flex_attention"), hf_inputs(padding)
    calls: list[AttentionCall] = []
    with torch.no_grad():
        plain = model(**inputs).logits
        with watch_attention(model, calls.append):
            assert torch.equal(model(**inputs).logits, plain)
    for call, attention in zip(calls, eager_attentions(model, **inputs), strict=True):
        found = call.statistics()
        sees = ~found.logsumexp.isneginf()
        torch.testing.assert_close(
            found.entropy[sees].double(), entropy_of(attention)[sees], atol=1e-5, rtol=0
        )


def test_flash_attention_is_described_as_it_computes():
    """No such kernel here: that the arguments are read as the library passes them on."""
    module = nn.Module()
    query, key = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 9, 8)
    padding = torch.ones(1, 9, dtype=torch.int64)
    given = {"scaling": 0.5, "sliding_window": 3, "softcap": 30.0, "dropout": 0.1}
    flash = ("a.b", "flash_attention_2", module, query, key, key)
    call = AttentionCall("a.b", 7, **interface_parts(*flash, padding, given))
    assert (call.scale, call.causal, call.window, call.softcap) == (0.5, True, 3, 30.0)
    assert call.mask is None
    assert call.padding is not None
    assert call.padding.dtype == torch.bool
    assert call.statistics().entropy.shape == (1, 4, 6)
    whole = AttentionCall("a.b", 7, **interface_parts(*flash, None, {"is_causal": False}))
    assert not whole.causal
    assert whole.padding is None
    with pytest.raises(ValueError, match=r"model cannot be watched: a\.b"):
        interface_parts("a.b", "sdpa", module, query, key, key, None, {"cache": torch.ones(1)})


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_encoder_and_decoder_with_biases_by_position(implementation: str):
    sizes: dict[str, Any] = {"d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 4}
    config = hf.T5Config(vocab_size=VOCABULARY, **sizes)
    model: Any = sharpen(hf.T5ForConditionalGeneration(config))
    model.set_attn_implementation(implementation)
    inputs = hf_inputs("right")
    inputs["decoder_input_ids"] = inputs["input_ids"][:, :6]
    calls: list[AttentionCall] = []
    with torch.no_grad():
        plain = model(**inputs).logits
        with watch_attention(model, calls.append):
            assert torch.equal(model(**inputs).logits, plain)
        model.set_attn_implementation("eager")
        output = model(**inputs, output_attentions=True)
    if not output.encoder_attentions:
        pytest.skip("this version of transformers does not return the attention of T5")
    expected = {"EncDecAttention": output.cross_attentions}
    expected |= {"encoder": output.encoder_attentions, "decoder": output.decoder_attentions}
    for call in calls:
        kind = "EncDecAttention" if "EncDec" in call.module else call.module.split(".")[0]
        truth = entropy_of(expected[kind][call.layer])
        found = call.statistics()
        real = ~found.logsumexp.isneginf()
        assert bool(real.all()) == (kind != "encoder")
        torch.testing.assert_close(found.entropy.double()[real], truth[real], atol=1e-5, rtol=0)
    assert len(calls) == 6
    assert {call.kind for call in calls} == {"encoder self", "decoder self", "decoder cross"}


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_with_a_cache_of_earlier_keys(name: str, implementation: str):
    model, inputs = hf_model(name, implementation), hf_inputs("none")
    tokens = inputs["input_ids"]
    rows: dict[int, list[Tensor]] = {0: [], 1: []}

    def see(call: AttentionCall) -> None:
        rows[call.layer].append(call.statistics().entropy)

    with torch.no_grad(), watch_attention(model, see):
        first = model(tokens[:, :6], use_cache=True)
        second = model(tokens[:, 6:-1], past_key_values=first.past_key_values, use_cache=True)
        model(tokens[:, -1:], past_key_values=second.past_key_values)
    for layer, attention in enumerate(eager_attentions(model, input_ids=tokens)):
        found = torch.cat(rows[layer], -1).double()
        torch.testing.assert_close(found, entropy_of(attention), atol=1e-5, rtol=0)


def test_training_gradients_and_random_numbers_are_as_without():
    model = hf_model("llama", "sdpa")
    model.config.attention_dropout = 0.3
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.3
    model.train()
    inputs = hf_inputs("none")

    def step(watched: bool) -> tuple[Tensor, list[Tensor]]:
        torch.manual_seed(3)
        model.zero_grad()
        if watched:
            with watch_attention(model, lambda call: calls.append(call)):
                loss = model(**inputs, labels=inputs["input_ids"]).loss
                loss.backward()
        else:
            loss = model(**inputs, labels=inputs["input_ids"]).loss
            loss.backward()
        return loss.detach(), [parameter.grad.clone() for parameter in model.parameters()]

    calls: list[AttentionCall] = []
    plain, watched = step(False), step(True)
    assert torch.equal(plain[0], watched[0])
    assert all(torch.equal(a, b) for a, b in zip(plain[1], watched[1], strict=True))
    assert not any(call.query.requires_grad or call.key.requires_grad for call in calls)
    model.eval()  # dropout is no part of what is measured
    first = eager_attentions(model, **inputs)[0]
    torch.testing.assert_close(
        calls[0].statistics().entropy.double(), entropy_of(first), atol=1e-5, rtol=0
    )


def test_what_checkpointing_computes_again_is_seen_once():
    model, inputs = hf_model("llama", "sdpa"), hf_inputs("none")
    model.train()
    enable_checkpointing(model)
    with watch_attention(model, lambda call: None) as watch:
        model(**inputs, labels=inputs["input_ids"], use_cache=False).loss.backward()
    assert watch.calls == 2


def test_other_models_and_other_watches_are_left_alone():
    one, other, inputs = hf_model("llama", "eager"), hf_model("gpt2", "sdpa"), hf_inputs("none")
    own = hf.AttentionInterface.get_interface
    seen_one: list[AttentionCall] = []
    seen_other: list[AttentionCall] = []
    with torch.no_grad():
        plain = other(**inputs).logits
        first = watch_attention(one, seen_one.append)
        second = watch_attention(other, seen_other.append)
        first.__enter__()
        assert torch.equal(other(**inputs).logits, plain)
        second.__enter__()
        one(**inputs)
        other(**inputs)
        first.__exit__(None, None, None)  # before the second, which began later
        one(**inputs)
        other(**inputs)
        second.__exit__(None, None, None)
        one(**inputs)
        other(**inputs)
    assert (len(seen_one), len(seen_other)) == (2, 4)
    assert hf.AttentionInterface.get_interface is own


def test_all_is_undone_after_an_error():
    model, inputs = hf_model("llama", "eager"), hf_inputs("none")
    own = hf.AttentionInterface.get_interface

    def see(call: AttentionCall) -> None:
        raise KeyError(call.module)

    with pytest.raises(KeyError, match=r"layers\.0"), watch_attention(model, see):
        model(**inputs)
    assert hf.AttentionInterface.get_interface is own
    assert not taps
    model(**inputs)


def test_a_hugging_face_model_inside_another_module():
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = hf_model("llama", "sdpa")

        def forward(self, tokens: Tensor) -> Tensor:
            return self.inner(tokens).logits

    model = Wrapped()
    with watch_attention(model, lambda call: None) as watch:
        model(hf_inputs("none")["input_ids"])
    assert watch.modules == [f"inner.model.layers.{i}.self_attn" for i in (0, 1)]


def test_a_way_of_its_own_is_no_silent_success():
    """GPT-2 with this option computes eager attention itself, past the interface."""
    model = hf_model("gpt2", "eager")
    for block in model.transformer.h:
        block.attn.reorder_and_upcast_attn = True
    with (
        pytest.raises(ValueError, match=r"no attention of GPT2LMHeadModel.*AttentionMap\("),
        watch_attention(model, lambda call: None),
    ):
        model(**hf_inputs("none"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_models_that_cannot_be_watched():
    with (
        pytest.raises(ValueError, match=r"got Linear: say where .*AttentionMap\("),
        watch_attention(nn.Linear(2, 2), lambda call: None),
    ):
        raise AssertionError
    with (
        pytest.raises(ValueError, match="must not be compiled"),
        watch_attention(torch.compile(hf_model("llama", "sdpa")), lambda call: None),  # pyright: ignore[reportArgumentType]
    ):
        raise AssertionError
    with (
        pytest.raises(ValueError, match="either it did not run"),
        watch_attention(nn.MultiheadAttention(8, 2), lambda call: None),
    ):
        pass


def test_transformers_is_not_needed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    model = nn.MultiheadAttention(8, 2)
    with watch_attention(model, lambda call: None) as watch:
        model(*[torch.zeros(3, 1, 8)] * 3)
    assert watch.calls == 1


def test_nothing_is_kept_alive():
    model, inputs = hf_model("llama", "sdpa"), hf_inputs("none")
    calls: list[weakref.ref[AttentionCall]] = []
    with watch_attention(model, lambda call: calls.append(weakref.ref(call))):
        model(**inputs)
    gc.collect()
    assert [call() for call in calls] == [None, None]


@pytest.mark.skipif("JOMA_MODELS" not in os.environ, reason="JOMA_MODELS names no folder of models")
def test_a_real_model():
    from joma.models.loading import load

    folder = os.environ["JOMA_MODELS"]
    model: Any = load(f"{folder}/stories/package/src/llama2.data").model
    tokens = torch.randint(0, 3000, (1, 200), generator=torch.Generator().manual_seed(0))
    entropies: list[Tensor] = []
    with (
        torch.no_grad(),
        watch_attention(model, lambda c: entropies.append(c.statistics().entropy)),
    ):
        model(tokens)
    for found, attention in zip(entropies, eager_attentions(model, input_ids=tokens), strict=True):
        torch.testing.assert_close(found.double(), entropy_of(attention), atol=1e-4, rtol=0)
