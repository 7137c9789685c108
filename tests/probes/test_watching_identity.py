"""Every attention of a model is a row of its own: module, pass and kind."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from joma.probes.tap import AttentionCall, watch_attention
from tests.probes._watched import assert_entropies, sharpen

TOKENS = torch.randint(2, 40, (2, 9), generator=torch.Generator().manual_seed(3))
MASK = torch.ones(2, 9, dtype=torch.long)
MASK[0, 6:] = 0
DECODED = TOKENS[:, :5]
PIXELS = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(4))
TOWER: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def bart() -> nn.Module:
    sides: dict[str, Any] = {}
    for side, heads in (("encoder", 4), ("decoder", 2)):  # unequal head counts
        sides |= {f"{side}_layers": 2, f"{side}_attention_heads": heads, f"{side}_ffn_dim": 20}
    config = hf.BartConfig(vocab_size=40, d_model=16, max_position_embeddings=16, **sides)
    return hf.BartForConditionalGeneration(config)


def t5() -> nn.Module:
    sizes: dict[str, Any] = {"d_model": 16, "d_kv": 4, "d_ff": 20, "num_layers": 2, "num_heads": 4}
    return hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=40, **sizes))


def clip() -> nn.Module:
    text = TOWER | {"vocab_size": 40, "max_position_embeddings": 16, "num_attention_heads": 4}
    config = hf.CLIPConfig(
        text_config=text, vision_config=TOWER | {"image_size": 8, "patch_size": 4}
    )
    return hf.CLIPModel(config)


def whisper() -> nn.Module:
    sizes: dict[str, Any] = {}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 2, f"{side}_attention_heads": 2, f"{side}_ffn_dim": 20}
    config = hf.WhisperConfig(
        vocab_size=40,
        d_model=16,
        num_mel_bins=4,
        max_source_positions=10,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
        decoder_start_token_id=1,
        **sizes,
    )
    return hf.WhisperForConditionalGeneration(config)


def albert() -> nn.Module:
    sizes: dict[str, Any] = TOWER | {"num_hidden_layers": 3, "max_position_embeddings": 16}
    return hf.AlbertModel(hf.AlbertConfig(vocab_size=40, embedding_size=8, **sizes))


SEQUENCES = {"input_ids": TOKENS, "attention_mask": MASK, "decoder_input_ids": DECODED}
FRAMES = torch.randn(2, 4, 20, generator=torch.Generator().manual_seed(5))
CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Tensor], dict[str, Any]]] = {
    "bart": (
        bart,
        SEQUENCES,
        {
            "encoder self": ("model.encoder.layers.{}.self_attn", "encoder_attentions", MASK),
            "decoder self": ("model.decoder.layers.{}.self_attn", "decoder_attentions", None),
            "decoder cross": ("model.decoder.layers.{}.encoder_attn", "cross_attentions", None),
        },
    ),
    "t5": (
        t5,
        SEQUENCES,
        {
            "encoder self": (
                "encoder.block.{}.layer.0.SelfAttention",
                "encoder_attentions",
                MASK,
            ),
            "decoder self": (
                "decoder.block.{}.layer.0.SelfAttention",
                "decoder_attentions",
                None,
            ),
            "decoder cross": (
                "decoder.block.{}.layer.1.EncDecAttention",
                "cross_attentions",
                None,
            ),
        },
    ),
    "whisper": (
        whisper,
        {"input_features": FRAMES, "decoder_input_ids": DECODED},
        {
            "encoder self": ("model.encoder.layers.{}.self_attn", "encoder_attentions", None),
            "decoder self": ("model.decoder.layers.{}.self_attn", "decoder_attentions", None),
            "decoder cross": ("model.decoder.layers.{}.encoder_attn", "cross_attentions", None),
        },
    ),
    "clip": (
        clip,
        {"input_ids": TOKENS, "attention_mask": MASK, "pixel_values": PIXELS},
        {
            "text self": ("text_model.encoder.layers.{}.self_attn", "text", MASK),
            "vision self": ("vision_model.encoder.layers.{}.self_attn", "vision", None),
        },
    ),
    "albert": (
        albert,
        {"input_ids": TOKENS, "attention_mask": MASK},
        {
            "self": (
                "encoder.albert_layer_groups.0.albert_layers.0.attention{}",
                "attentions",
                MASK,
            )
        },
    ),
}


def attentions(output: Any, name: str) -> tuple[Tensor, ...]:
    if name in ("text", "vision"):
        return output[f"{name}_model_output"].attentions
    if not output.get(name):
        pytest.skip("this version of transformers does not return the attention of T5")
    return output[name]


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", CASES)
def test_each_attention_is_its_own(name: str, implementation: str):
    build, inputs, expected = CASES[name]
    model: Any = sharpen(build())
    model.set_attn_implementation(implementation)
    calls: list[AttentionCall] = []
    with torch.no_grad():
        plain = model(**inputs)[0]
        with watch_attention(model, calls.append):
            assert torch.equal(model(**inputs)[0], plain)
            model(**inputs)  # passes are counted anew
        model.set_attn_implementation("eager")
        output = model(**inputs, output_attentions=True)
    half = len(calls) // 2
    assert [call.name for call in calls[:half]] == [call.name for call in calls[half:]]
    by_name = {call.name: call for call in calls}
    assert len(by_name) == half
    for kind, (path, attribute, mask) in expected.items():
        for number, attention in enumerate(attentions(output, attribute)):
            shared = "#" + str(number) if number else ""
            key = path.format(shared if name == "albert" else number)
            call = by_name.pop(key)
            assert call.kind == kind
            assert_entropies(call, attention, None if mask is None else mask.bool())
    assert not by_name


def test_self_and_cross_attention_of_nn_transformer():
    model = sharpen(nn.Transformer(16, 2, 2, 2, 20, batch_first=True))
    generator = torch.Generator().manual_seed(6)
    source, target = (torch.randn(2, n, 16, generator=generator) for n in (7, 7))
    padded = torch.zeros(2, 7, dtype=torch.bool)
    padded[1, 4:] = True
    calls: list[AttentionCall] = []
    given: dict[str, Any] = {"tgt_key_padding_mask": padded}
    with torch.no_grad():
        plain = model(source, target, **given)
        with watch_attention(model, calls.append):
            assert torch.equal(model(source, target, **given), plain)
    assert [(call.name, call.kind) for call in calls] == [
        *((f"encoder.layers.{i}.self_attn", "encoder self") for i in range(2)),
        *(
            (f"decoder.layers.{i}.{part}", kind)
            for i in range(2)
            for part, kind in (("self_attn", "decoder self"), ("multihead_attn", "decoder cross"))
        ),
    ]
    for call in calls:  # cross-attention rows follow the decoder
        rows = None if call.kind == "encoder self" else ~padded
        assert (call.rows is None) == (rows is None)
        assert rows is None or torch.equal(call.rows, rows)  # pyright: ignore[reportArgumentType]


class Shared(nn.Module):
    """One block that runs several times."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor, times: int) -> Tensor:
        for _ in range(times):
            x = self.block(x, x, x)[0]
        return x


def test_passes_of_a_shared_block_are_counted_in_each_forward_pass():
    model, x = Shared(), torch.randn(1, 3, 8)
    names: list[str] = []
    with watch_attention(model, lambda call: names.append(call.name)):
        model(x, 3)
        model(x, 2)
        model.block(x, x, x)  # no pass of the model
    assert names == ["block", "block#1", "block#2", "block", "block#1", "block"]


def test_a_pass_that_fails_leaves_no_count():
    model, x = Shared(), torch.randn(1, 3, 8)
    names: list[str] = []
    with watch_attention(model, lambda call: names.append(call.name)):
        with pytest.raises(AssertionError):
            model(torch.randn(1, 3, 7), 1)
        model(x, 2)
    assert names == ["block", "block#1"]
