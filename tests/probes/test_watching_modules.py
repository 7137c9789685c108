import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from joma.models.parts import Part
from joma.probes.tap import AttentionCall, AttentionMap, watch_attention
from tests.probes._watched import assert_entropies, entropy_of, sharpen


def attention_masks(batch: int, heads: int, queries: int, keys: int) -> dict[str, dict[str, Any]]:
    generator = torch.Generator().manual_seed(5)
    hidden = torch.rand(queries, keys, generator=generator) < 0.3
    hidden[:, 0] = False
    padded = torch.zeros(batch, keys, dtype=torch.bool)
    padded[0, -2:] = True
    bias = torch.randn(queries, keys, generator=generator)
    each = torch.rand(batch * heads, queries, keys, generator=generator) < 0.3
    each[..., 0] = False
    return {
        "nothing": {},
        "bool mask": {"attn_mask": hidden},
        "mask of numbers": {"attn_mask": bias},
        "mask per head": {"attn_mask": each},
        "padding": {"key_padding_mask": padded},
        "padding and mask": {"attn_mask": hidden, "key_padding_mask": padded},
        "numbers": {
            "attn_mask": bias,
            "key_padding_mask": torch.zeros(batch, keys).masked_fill(padded, -math.inf),
        },
    }


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("kind", ["self", "cross", "other widths", "no bias", "odd heads"])
@pytest.mark.parametrize("mask", attention_masks(1, 1, 1, 3).keys())
def test_multihead_attention(kind: str, mask: str, batch_first: bool, training: bool):
    heads, width = (3, 24) if kind == "odd heads" else (4, 32)
    extra: dict[str, Any] = {"kdim": 20, "vdim": 12} if kind == "other widths" else {}
    module = nn.MultiheadAttention(
        width, heads, bias=kind != "no bias", batch_first=batch_first, **extra
    )
    sharpen(module).train(training)
    if module.in_proj_bias is not None:
        nn.init.normal_(module.in_proj_bias)
    generator = torch.Generator().manual_seed(6)
    query = torch.randn(2, 7, width, generator=generator)
    key = value = query
    if kind in ("cross", "other widths"):
        key = torch.randn(2, 9, extra.get("kdim", width), generator=generator)
        value = torch.randn(2, 9, extra.get("vdim", width), generator=generator)
    given = attention_masks(2, heads, 7, key.shape[1])[mask]
    if not batch_first:
        together = key is query
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        if together:
            key = value = query
    calls: list[AttentionCall] = []
    with torch.no_grad():
        plain = module(query, key, value, **given, average_attn_weights=False)
        quick = module(query, key, value, **given, need_weights=False)[0]
        with watch_attention(module, calls.append):
            watched = module(query, key, value, **given, average_attn_weights=False)
            assert torch.equal(module(query, key, value, need_weights=False, **given)[0], quick)
    assert torch.equal(watched[0], plain[0])
    assert torch.equal(watched[1], plain[1])
    assert "forward" not in vars(module)
    assert len(calls) == 2
    for call in calls:
        real = torch.ones(2, 7, dtype=torch.bool)
        if "key_padding_mask" in given and key.shape == query.shape:
            real[0, -2:] = False  # padded queries see no key
        assert_entropies(call, plain[1], real)
        assert call.kind == ("cross" if kind in ("cross", "other widths") else "self")


@pytest.mark.parametrize("need_weights", [False, True])
def test_multihead_attention_with_a_causal_hint(need_weights: bool):
    module = sharpen(nn.MultiheadAttention(32, 4))
    inputs = torch.randn(6, 2, 32, generator=torch.Generator().manual_seed(7))
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    calls: list[AttentionCall] = []
    with torch.no_grad(), watch_attention(module, calls.append):
        module(inputs, inputs, inputs, None, need_weights, mask, is_causal=True)
    _, attention = module(*[inputs] * 3, attn_mask=mask, average_attn_weights=False)
    truth = entropy_of(attention)
    torch.testing.assert_close(calls[0].statistics().entropy.double(), truth, atol=1e-5, rtol=0)


def test_multihead_attention_without_batch():
    module = sharpen(nn.MultiheadAttention(32, 4, batch_first=True))
    inputs = torch.randn(6, 32, generator=torch.Generator().manual_seed(8))
    padded = torch.tensor([False] * 4 + [True] * 2)
    calls: list[AttentionCall] = []
    with torch.no_grad(), watch_attention(module, calls.append):
        _, attention = module(*[inputs] * 3, key_padding_mask=padded, average_attn_weights=False)
    assert_entropies(calls[0], attention.unsqueeze(0), ~padded.unsqueeze(0))


@pytest.mark.parametrize("extra", ["add_bias_kv", "add_zero_attn"])
def test_keys_of_the_modules_own_are_refused(extra: str):
    module = nn.MultiheadAttention(8, 2, **{extra: True})
    with (
        pytest.raises(ValueError, match=f"a key of its own .*{extra}"),
        watch_attention(module, lambda call: None),
    ):
        raise AssertionError
    assert "forward" not in vars(module)


def encoder(*, norm_first: bool, nested: bool) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(32, 4, 40, 0.1, batch_first=True, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=nested)
    for number, inner in enumerate(model.layers):
        sharpen(inner, number)
    return model.eval()


@pytest.mark.parametrize("mask", ["nothing", "mask", "padding", "both", "causal"])
@pytest.mark.parametrize(
    ("norm_first", "nested"), [(False, False), (False, True), (True, False)], ids=str
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_encoder_outputs_stay_also_on_the_fused_path(mask: str, norm_first: bool, nested: bool):
    model = encoder(norm_first=norm_first, nested=nested)
    inputs = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(9))
    hidden = torch.rand(7, 7, generator=torch.Generator().manual_seed(10)) < 0.3
    hidden[:, 0] = False
    padded = torch.zeros(2, 7, dtype=torch.bool)
    padded[0, 5:] = True
    given: dict[str, Any] = {
        "nothing": {},
        "mask": {"mask": hidden},
        "padding": {"src_key_padding_mask": padded},
        "both": {"mask": hidden, "src_key_padding_mask": padded},
        "causal": {
            "mask": nn.Transformer.generate_square_subsequent_mask(7),
            "is_causal": True,
        },
    }[mask]
    calls: list[AttentionCall] = []
    with torch.no_grad():
        plain = model(inputs, **given)
        with watch_attention(model, calls.append):
            assert torch.equal(model(inputs, **given), plain)
        again: list[AttentionCall] = []
        torch.backends.mha.set_fastpath_enabled(False)
        try:  # the other path, which goes through the attention modules
            with watch_attention(model, again.append):
                model(inputs, **given)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    assert [call.module for call in calls] == [f"layers.{i}.self_attn" for i in range(3)]
    assert [call.layer for call in again] == [0, 1, 2]
    truth = layer_attentions(model, inputs, given, norm_first)
    for fused, plainly, attention in zip(calls, again, truth, strict=True):
        real = ~padded[:, None] if "src_key_padding_mask" in given else torch.ones(2, 1, 7) > 0
        real = real.expand(2, 4, 7)
        for call in (fused, plainly):
            torch.testing.assert_close(
                call.statistics().entropy[real].double(),
                entropy_of(attention)[real],
                atol=1e-5,
                rtol=0,
            )


def layer_attentions(
    model: nn.TransformerEncoder, inputs: Tensor, given: dict[str, Any], norm_first: bool
) -> list[Tensor]:
    """Weights that the attention modules return, layer by layer, without any fused call."""
    attentions = []
    torch.backends.mha.set_fastpath_enabled(False)
    with torch.no_grad():
        for layer in model.layers:
            assert isinstance(layer, nn.TransformerEncoderLayer)
            x = layer.norm1(inputs) if norm_first else inputs
            attentions.append(
                layer.self_attn(
                    x,
                    x,
                    x,
                    attn_mask=given.get("mask"),
                    key_padding_mask=given.get("src_key_padding_mask"),
                    average_attn_weights=False,
                )[1]
            )
            inputs = layer(inputs, given.get("mask"), given.get("src_key_padding_mask"))
    torch.backends.mha.set_fastpath_enabled(True)
    return attentions


class Wrapped(nn.Module):
    """An attention module inside another, as adapters put it there."""

    def __init__(self, inner: nn.MultiheadAttention, called: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Identity(), inner])
        self.batch_first = inner.batch_first
        self._called = called

    def __getattr__(self, name: str) -> Any:
        own = name in ("parts", "_called")
        return super().__getattr__(name) if own else getattr(self.parts[1], name)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Any:
        return self.parts[1](query, key, value, **given) if self._called else (query, None)


@pytest.mark.parametrize("fast", [False, True])
def test_attention_inside_another_module_is_seen(fast: bool):
    model = encoder(norm_first=False, nested=False)
    inputs = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(12))
    plainly: list[AttentionCall] = []
    calls: list[AttentionCall] = []
    torch.backends.mha.set_fastpath_enabled(fast)
    try:
        with torch.no_grad():
            with watch_attention(model, plainly.append):
                plain = model(inputs)
            layer: Any = model.layers[2]
            layer.self_attn = Wrapped(layer.self_attn, called=True)
            with watch_attention(model, calls.append):
                assert torch.equal(model(inputs), plain)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    assert calls[2].module == "layers.2.self_attn.parts.1"
    assert [call.layer for call in calls] == [0, 1, 2]
    for call, before in zip(calls, plainly, strict=True):
        assert torch.equal(call.query, before.query)
        assert torch.equal(call.key, before.key)


class Mixing(nn.Module):
    """What mixes tokens without attention."""

    batch_first = True

    def forward(self, query: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        return query.mean(1, keepdim=True).expand_as(query), None


def test_attention_that_cannot_be_seen_is_refused_in_one_sentence():
    message = "attention of layers.1 is computed by a {} in a way of its own: say where"
    model = encoder(norm_first=False, nested=False).train()  # in training nothing is fused
    layer: Any = model.layers[1]
    inner, layer.self_attn = layer.self_attn, Mixing()
    with (
        pytest.raises(ValueError, match=message.format("Mixing")),
        watch_attention(model, lambda call: None),
    ):
        raise AssertionError
    layer.self_attn = Wrapped(inner, called=False)
    with (
        pytest.raises(ValueError, match=message.format("Wrapped")),
        watch_attention(model, lambda call: None),
    ):
        model(torch.zeros(2, 7, 32))
    assert not any("forward" in vars(module) for module in model.modules())


def test_transformer_with_decoder_in_training():
    model = nn.Transformer(32, 4, 1, 2, 40, batch_first=True)
    torch.manual_seed(0)
    inputs = torch.randn(2, 5, 32)
    rng = torch.get_rng_state()
    plain = model(inputs, inputs[:, :4])
    torch.set_rng_state(rng)
    with watch_attention(model, lambda call: None) as watch:
        watched = model(inputs, inputs[:, :4])
    assert torch.equal(plain, watched)
    assert watch.modules == [
        "encoder.layers.0.self_attn",
        "decoder.layers.0.self_attn",
        "decoder.layers.0.multihead_attn",
        "decoder.layers.1.self_attn",
        "decoder.layers.1.multihead_attn",
    ]


class Block(nn.Module):
    def __init__(self, width: int, heads: int, key_heads: int) -> None:
        super().__init__()
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width // heads * key_heads)
        self.qkv = nn.Linear(width, 3 * width)
        self.sizes = (heads, key_heads)

    def forward(self, x: Tensor, fused: bool) -> tuple[Tensor, Tensor]:
        heads, key_heads = self.sizes
        if fused:
            q, k, _ = self.qkv(x).chunk(3, -1)
            key_heads = heads
        else:
            q, k = self.q(x), self.k(x)
        q = q.unflatten(-1, (heads, -1)).transpose(1, 2)
        k = k.unflatten(-1, (key_heads, -1)).transpose(1, 2)
        attention = (q @ k.repeat_interleave(heads // key_heads, 1).mT).softmax(-1)
        return x + attention.mean(1) @ x, attention


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(24, 4, 2) for _ in range(2))

    def forward(self, x: Tensor, fused: bool = False) -> list[Tensor]:
        attentions = []
        for block in self.blocks:
            x, attention = block(x, fused)
            attentions.append(attention)
        return attentions


NAMES = AttentionMap(
    query="blocks.{layer}.q", key="blocks.{layer}.k", heads=4, key_heads=2, causal=False, scale=1.0
)


@pytest.mark.parametrize("fused", [False, True])
def test_custom_module_through_names(fused: bool):
    model = sharpen(Custom())
    inputs = torch.randn(2, 6, 24, generator=torch.Generator().manual_seed(11))
    names = NAMES
    if fused:
        names = AttentionMap(
            query="blocks.{layer}.qkv",
            key="blocks.{layer}.qkv",
            heads=4,
            causal=False,
            scale=1.0,
            query_part=Part(0, of=3),
            key_part=Part(1, of=3),
        )
    calls: list[AttentionCall] = []
    with watch_attention(model, calls.append, names=names):
        attentions = model(inputs, fused)
    assert [call.layer for call in calls] == [0, 1]
    for call, attention in zip(calls, attentions, strict=True):
        assert not call.query.requires_grad
        found = call.statistics().entropy
        torch.testing.assert_close(
            found.double(), entropy_of(attention.detach()), atol=1e-5, rtol=0
        )
    assert not any(module._forward_hooks for module in model.modules())


def test_shapes_of_named_outputs():
    model = nn.ModuleDict(
        {"q": nn.ModuleList([nn.Identity()]), "k": nn.ModuleList([nn.Identity()])}
    )
    names = AttentionMap(query="q.{layer}", key="k.{layer}", heads=4)

    def run(query: Any, key: Any) -> AttentionCall:
        calls: list[AttentionCall] = []
        with watch_attention(model, calls.append, names=names):
            model["k"][0](key)  # pyright: ignore[reportIndexIssue]
            model["q"][0](query)  # pyright: ignore[reportIndexIssue]
        return calls[0]

    assert run(torch.zeros(2, 4, 5, 3), torch.zeros(2, 4, 6, 3)).key.shape == (2, 4, 6, 3)
    assert run(torch.zeros(5, 12), torch.zeros(6, 12)).query.shape == (1, 4, 5, 3)
    with pytest.raises(ValueError, match=r"query must name .* returned \(2, 5, 13\)"):
        run(torch.zeros(2, 5, 13), torch.zeros(2, 5, 12))
    with pytest.raises(ValueError, match="key must name a module that returns a tensor"):
        run(torch.zeros(2, 5, 12), "nothing")


def test_names_that_do_not_fit():
    model = Custom()
    with pytest.raises(ValueError, match=r"query must have \{layer\} once"):
        AttentionMap(query="q", key="k.{layer}", heads=2)
    with pytest.raises(ValueError, match="key_heads must divide heads = 4, got 3"):
        AttentionMap(query="q.{layer}", key="k.{layer}", heads=4, key_heads=3)
    with pytest.raises(ValueError, match="query_part and key_part must say"):
        AttentionMap(query="q.{layer}", key="q.{layer}", heads=4)
    wrong = AttentionMap(query="blocks.{layer}.q", key="layers.{layer}.k", heads=4)
    with (
        pytest.raises(ValueError, match=r"got layers 0, 1 at 'blocks.*none at 'layers.*blocks\.0"),
        watch_attention(model, lambda call: None, names=wrong),
    ):
        raise AssertionError
    with (
        pytest.raises(ValueError, match="got only the query of layer 0"),
        watch_attention(model, lambda call: None, names=NAMES),
    ):
        model.blocks[0].q(torch.zeros(1, 2, 24))  # pyright: ignore[reportCallIssue]
