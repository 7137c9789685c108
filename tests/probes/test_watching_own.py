"""Hugging Face models that compute attention themselves, with sinks, or not at all."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from joma.models import enable_checkpointing
from joma.probes.tap import AttentionCall, watch_attention
from tests.probes._watched import assert_entropies, sharpen

TOKENS = torch.randint(3, 40, (2, 9), generator=torch.Generator().manual_seed(3))
SIZES: dict[str, Any] = {"vocab_size": 40, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GPT: dict[str, Any] = SIZES | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}
WIDE: dict[str, Any] = SIZES | {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
FALCON: dict[str, Any] = {key: WIDE[key] for key in WIDE if key != "intermediate_size"}

CONFIGS: dict[str, Callable[[], Any]] = {
    "bloom": lambda: hf.BloomConfig(**SIZES, hidden_size=32, n_layer=2, n_head=4),
    "falcon": lambda: hf.FalconConfig(**FALCON),
    "falcon with ALiBi": lambda: hf.FalconConfig(**FALCON, alibi=True),
    "mpt": lambda: hf.MptConfig(d_model=32, n_heads=4, n_layers=2, max_seq_len=16, vocab_size=40),
    "gptj": lambda: hf.GPTJConfig(**GPT, rotary_dim=4),
    "gpt_neo": lambda: hf.GPTNeoConfig(
        **SIZES,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=4,
        max_position_embeddings=16,
    ),
    "codegen": lambda: hf.CodeGenConfig(**GPT, rotary_dim=4),
    "xglm": lambda: hf.XGLMConfig(**SIZES, d_model=32, ffn_dim=40, num_layers=2, attention_heads=4),
    "openai-gpt": lambda: hf.OpenAIGPTConfig(
        vocab_size=40, n_embd=32, n_layer=2, n_head=4, n_positions=16
    ),
    "deberta-v2": lambda: hf.DebertaV2Config(
        **WIDE, relative_attention=True, pos_att_type=["p2c", "c2p"]
    ),
    "roformer": lambda: hf.RoFormerConfig(**WIDE),
}


def inputs(padding: str) -> dict[str, Tensor]:
    mask = torch.ones_like(TOKENS)
    if padding != "none":
        mask[0, slice(0, 3) if padding == "left" else slice(6, 9)] = 0
    return {"input_ids": TOKENS} | ({} if padding == "none" else {"attention_mask": mask})


def built(name: str, implementation: str = "eager") -> Any:
    model: Any = hf.AutoModel.from_config(CONFIGS[name](), attn_implementation=implementation)
    return sharpen(model)


def eager(model: Any, **given: Any) -> tuple[Tensor, ...]:
    with torch.no_grad():
        return model(**given, output_attentions=True).attentions


CASES = [*((name, "eager") for name in CONFIGS), ("falcon", "sdpa")]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # DeBERTa scripts functions
@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize(("name", "implementation"), CASES)
def test_attention_of_its_own(name: str, implementation: str, padding: str):
    model, given = built(name, implementation), inputs(padding)
    calls: list[AttentionCall] = []
    with torch.no_grad():
        plain = model(**given)[0]
        with watch_attention(model, calls.append) as watch:
            assert torch.equal(model(**given)[0], plain)
    assert not any("forward" in vars(module) for module in model.modules())
    assert watch.calls == 2
    real = given.get("attention_mask", torch.ones_like(TOKENS)).bool()
    for number, (call, attention) in enumerate(
        zip(calls, eager(built(name), **given), strict=True)
    ):
        assert (call.layer, call.kind, call.pass_index) == (number, "self", 0)
        assert_entropies(call, attention, real)
        even = call.uniform().statistics().entropy[1, 0]
        if name not in ("deberta-v2", "roformer", "gpt_neo"):  # causal, without a window
            counts = torch.arange(1.0, 10)
            torch.testing.assert_close(even, counts.log(), atol=1e-5, rtol=0)


def test_alibi_given_to_sdpa_as_a_mask(monkeypatch: pytest.MonkeyPatch):
    """The library's eager Falcon adds ALiBi twice, so it is no reference here."""
    attentions: list[Tensor] = []
    own = nn.functional.scaled_dot_product_attention

    def record(query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Tensor:
        scores = query @ key.mT / query.shape[-1] ** 0.5 + given["attn_mask"]
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        attentions.append(weights / weights.sum(-1, keepdim=True))
        return own(query, key, value, **given)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", record)
    calls: list[AttentionCall] = []
    model = built("falcon with ALiBi", "sdpa")
    with torch.no_grad(), watch_attention(model, calls.append):
        model(TOKENS)
    for call, attention in zip(calls, attentions, strict=True):
        assert call.mask is not None
        assert_entropies(call, attention)


def test_gradients_and_random_numbers_are_as_without():
    model = sharpen(
        hf.BloomForCausalLM(
            hf.BloomConfig(**SIZES, hidden_size=32, n_layer=2, n_head=4, attention_dropout=0.2)
        )
    )
    model.train()

    def step(watched: bool) -> list[Tensor]:
        torch.manual_seed(1)
        model.zero_grad()
        if watched:
            with watch_attention(model, lambda call: None):
                loss = model(TOKENS, labels=TOKENS).loss
                loss.backward()
        else:
            loss = model(TOKENS, labels=TOKENS).loss
            loss.backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        return [loss.detach(), *(x.clone() for x in gradients if x is not None)]

    assert all(map(torch.equal, step(False), step(True)))


def test_checkpointing_is_seen_once():
    model: Any = built("bloom")
    model.train()
    enable_checkpointing(model)
    names: list[str] = []
    with watch_attention(model, lambda call: names.append(call.name)):
        model(TOKENS, use_cache=False)[0].sum().backward()
    assert names == ["h.0.self_attention", "h.1.self_attention"]


def test_with_a_cache_of_earlier_keys():
    model = built("gptj")
    rows: dict[int, list[Tensor]] = {0: [], 1: []}

    def see(call: AttentionCall) -> None:
        rows[call.layer].append(call.statistics().entropy)

    with torch.no_grad(), watch_attention(model, see):
        first = model(TOKENS[:, :5], use_cache=True)
        model(TOKENS[:, 5:], past_key_values=first.past_key_values, use_cache=True)
    for layer, attention in enumerate(eager(model, input_ids=TOKENS)):
        p = attention.double()
        truth = -torch.special.xlogy(p, p).sum(-1)
        torch.testing.assert_close(torch.cat(rows[layer], -1).double(), truth, atol=1e-5, rtol=0)


@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_sinks_are_one_more_outcome(padding: str):
    config = hf.GptOssConfig(
        **WIDE,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
    )
    model: Any = sharpen(hf.GptOssModel(config))
    for layer in model.layers:
        nn.init.normal_(layer.self_attn.sinks)
    model.set_attn_implementation("eager")
    given, calls = inputs(padding), list[AttentionCall]()
    with torch.no_grad():
        plain = model(**given)[0]
        with watch_attention(model, calls.append):
            assert torch.equal(model(**given)[0], plain)
    real = given.get("attention_mask", torch.ones_like(TOKENS)).bool()
    for call, attention in zip(calls, eager(model, **given), strict=True):
        sink = 1 - attention.sum(-1, keepdim=True)
        assert sink[real[:, None].expand(2, 4, 9)].mean() > 0.01
        assert_entropies(call, torch.cat((attention, sink.clamp(min=0)), -1), real)
        first = call.statistics(first=1).first
        assert first is not None
        sees = real[:, None].expand_as(first)
        torch.testing.assert_close(first[sees], attention[..., 0][sees], atol=1e-6, rtol=0)
        with pytest.raises(ValueError, match="received is not measured where there are sinks"):
            call.statistics(received=True)


LONG: dict[str, Any] = WIDE | {"max_position_embeddings": 128}
BLOCKS: dict[str, Any] = LONG | {"block_size": 4, "num_random_blocks": 1}
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "longformer": (
        lambda: hf.LongformerModel(hf.LongformerConfig(**LONG, attention_window=4)),
        "longformer models cannot be watched: such a model computes attention over blocks",
    ),
    "mamba": (
        lambda: hf.MambaModel(hf.MambaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1)),
        "mamba models cannot be watched: such a model has no softmax attention",
    ),
    "big bird in blocks": (
        lambda: hf.BigBirdModel(hf.BigBirdConfig(**BLOCKS)),
        r"encoder\.layer\.0\.attention\.self, a BigBirdBlockSparseAttention, takes",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_measured_is_refused_in_one_sentence(name: str):
    build, message = REFUSED[name]
    model = build().eval()
    tokens = torch.randint(3, 40, (1, 80), generator=torch.Generator().manual_seed(4))
    with (
        pytest.raises(ValueError, match=message) as error,
        watch_attention(model, lambda call: None),
    ):
        model(tokens)
    assert "\n" not in str(error.value)
    model(tokens)
    assert not any("forward" in vars(module) for module in model.modules())
