"""Sequences packed into one, and padding: only what a real query of a sequence sees counts."""

import itertools
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from joma.probes import AttentionAccumulator
from joma.probes.tap import AttentionCall, watch_attention
from joma.probes.tap.huggingface import interface_parts
from tests.probes._watched import entropy_of, sharpen
from tests.probes.test_watching import GROUPED, SIZES, VOCABULARY
from tests.probes.test_watching_identity import DECODED, MASK, TOKENS, bart

LENGTHS = (5, 9, 4)
SEQUENCES = [
    torch.randint(0, VOCABULARY, (1, n), generator=torch.Generator().manual_seed(n))
    for n in LENGTHS
]
BOUNDS = torch.tensor([0, 5, 14, 18], dtype=torch.int32)
PACKED: dict[str, Any] = {
    "input_ids": torch.cat(SEQUENCES, 1),
    "position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None],
    "use_cache": False,
}
FLATTENED: dict[str, Any] = PACKED | {  # as collators for flash attention add
    "cu_seq_lens_q": BOUNDS,
    "cu_seq_lens_k": BOUNDS,
    "max_length_q": 9,
    "max_length_k": 9,
}
MODELS: dict[str, Any] = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**GROUPED, sliding_window=4)),
    "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**SIZES)),
}


def entropies(model: nn.Module, **given: Any) -> list[Tensor]:
    found: list[Tensor] = []
    with torch.no_grad(), watch_attention(model, lambda c: found.append(c.statistics().entropy)):
        model(**given)
    return found


@pytest.mark.parametrize("given", [PACKED, FLATTENED], ids=["position_ids", "cu_seq_lens"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_packed_sequences_are_measured_as_if_apart(
    name: str, implementation: str, given: dict[str, Any]
):
    model: Any = sharpen(MODELS[name]())
    model.set_attn_implementation(implementation)
    apart = [entropies(model, input_ids=tokens, use_cache=False) for tokens in SEQUENCES]
    for layer, packed in enumerate(entropies(model, **given)):
        expected = torch.cat([one[layer] for one in apart], -1)
        torch.testing.assert_close(packed, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["cu_seq_lens_q", "position_ids"])
@pytest.mark.parametrize("window", [None, 3])
def test_flash_attention_of_packed_sequences(name: str, window: int | None):
    """No such kernel here: that its arguments are understood as it understands them."""
    generator = torch.Generator().manual_seed(1)
    query, key = torch.randn(1, 4, 18, 8, generator=generator), torch.randn(1, 2, 18, 8)
    given = {name: BOUNDS if name == "cu_seq_lens_q" else PACKED["position_ids"]}
    given["sliding_window"] = window

    def call(places: slice, **given: Any) -> AttentionCall:
        q, k = query[:, :, places], key[:, :, places]
        parts = interface_parts("a", "flash_attention_2", nn.Module(), q, k, k, None, given)
        return AttentionCall("a", 0, **parts)

    ends = BOUNDS.tolist()
    apart = [
        call(slice(low, high), sliding_window=window).statistics().entropy
        for low, high in itertools.pairwise(ends)
    ]
    found = call(slice(None), **given)
    torch.testing.assert_close(found.statistics().entropy, torch.cat(apart, -1))
    plain = call(slice(None), position_ids=torch.arange(3, 21)[None], sliding_window=window)
    assert plain.mask is None


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", MODELS)
def test_means_are_over_real_queries(name: str, implementation: str, side: str):
    model: Any = sharpen(MODELS[name]())
    model.set_attn_implementation(implementation)
    mask = MASK if side == "right" else MASK.flip(1)
    given = {"input_ids": TOKENS, "attention_mask": mask}
    means: list[Tensor] = []

    def see(call: AttentionCall) -> None:
        rows = AttentionAccumulator()
        rows.update(call.statistics())
        means.append(rows.compute().entropy)

    with torch.no_grad():
        with watch_attention(model, see):
            model(**given)
        model.set_attn_implementation("eager")
        attentions = model(**given, output_attentions=True).attentions
    for mean, attention in zip(means, attentions, strict=True):
        truth = entropy_of(attention).transpose(1, 2)[mask.bool()].mean(0)
        torch.testing.assert_close(mean, truth, atol=1e-5, rtol=0)


def test_rows_of_a_decoder_follow_its_own_mask():
    model: Any = sharpen(bart())
    decoder_mask = torch.ones_like(DECODED)
    decoder_mask[1, :2] = 0
    calls: list[AttentionCall] = []
    with torch.no_grad(), watch_attention(model, calls.append):
        model(
            input_ids=TOKENS,
            attention_mask=MASK,
            decoder_input_ids=DECODED,
            decoder_attention_mask=decoder_mask,
        )
    for call in calls:
        expected = MASK if call.kind == "encoder self" else decoder_mask
        assert call.rows is not None
        assert torch.equal(call.rows, expected.bool()), call.name


def test_rows_with_a_cache_are_the_last():
    model: Any = sharpen(MODELS["llama"]())
    mask = MASK.flip(1)
    calls: list[AttentionCall] = []
    with torch.no_grad(), watch_attention(model, calls.append):
        first = model(TOKENS[:, :2], attention_mask=mask[:, :2], use_cache=True)
        model(TOKENS[:, 2:], attention_mask=mask, past_key_values=first.past_key_values)
    for call, expected in zip(calls[::2], (mask[:, :2], mask[:, 2:]), strict=True):
        assert call.rows is not None
        assert torch.equal(call.rows, expected.bool())


def test_a_bool_mask_of_a_registered_attention_hides():
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register("own_attention", sdpa_attention_forward)
    AttentionMaskInterface.register("own_attention", sdpa_mask)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = hf.LlamaConfig(**sizes, num_attention_heads=2, vocab_size=30)
    model = hf.LlamaModel(config).eval()
    tokens = torch.arange(1, 21).view(2, 10)
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    found = {}
    for name in ("sdpa", "own_attention"):
        model.set_attn_implementation(name)
        with watch_attention(model, lambda call, name=name: found.setdefault(name, call)):
            model(input_ids=tokens, attention_mask=mask)
    own, usual = (found[name].statistics().entropy for name in ("own_attention", "sdpa"))
    torch.testing.assert_close(own[1], usual[1])
    assert float(own[1, 0, 1].max()) < 0.7  # the second query sees two keys
