"""One tap on any attention: what it measures against the softmax written out, what it replaces."""

import contextlib
import gc
import math
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from transformers.integrations import sdpa_attention

from joma.errors import JomaError
from joma.models import enable_checkpointing
from joma.models.model_weights import Part
from joma.probes import AttentionMap, probe, tap_attention, watch_attention
from joma.probes.tap import AttentionCall
from tests.architectures import _reference

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]

TOKENS = torch.randint(3, 40, (2, 9), generator=torch.Generator().manual_seed(1))
INPUTS = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(2))
TOLERANCE = 1e-5


class FusedAttention(nn.Module):
    """Queries, keys and values of one matrix, and `scaled_dot_product_attention` or a softmax."""

    def __init__(self, matrix: str, causal: bool) -> None:
        super().__init__()
        self.matrix, self.causal, self.written_out = matrix, causal, False
        setattr(self, matrix, nn.Linear(32, 96))
        self.proj = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        fused = getattr(self, self.matrix)(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        query, key, value = fused.unbind(0)
        if self.written_out:
            scores = query @ key.mT / math.sqrt(8)
            if self.causal:
                scores = scores.masked_fill(torch.ones(9, 9).triu(1) > 0, -torch.inf)
            found = torch.softmax(scores, -1) @ value
        else:
            found = nn.functional.scaled_dot_product_attention(
                query, key, value, is_causal=self.causal
            )
        return self.proj(found.transpose(1, 2).flatten(2))


class CausalSelfAttention(FusedAttention):
    """As nanoGPT has it."""

    def __init__(self) -> None:
        super().__init__("c_attn", causal=True)


class Attention(FusedAttention):
    """As timm's vision transformers have it."""

    def __init__(self) -> None:
        super().__init__("qkv", causal=False)


class Block(nn.Module):
    def __init__(self, attention: Callable[[], FusedAttention]) -> None:
        super().__init__()
        self.attn, self.norm = attention(), nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(self.norm(x))


class AttentionPooling(nn.Module):
    """No attention, though it is called one."""

    def forward(self, x: Tensor) -> Tensor:
        return (x[..., :1].softmax(1) * x).sum(1, keepdim=True)


class Fused(nn.Module):
    def __init__(self, attention: Callable[[], FusedAttention]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(attention) for _ in range(2))
        self.pooling = AttentionPooling()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x + self.pooling(x)


def sharp(model: Any, seed: int = 0) -> Any:
    """Weights large enough that attention is neither even nor the same in all heads."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 or name.endswith(("bias", "sinks")):
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


_SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
}
_GROUPED: dict[str, Any] = _SIZES | {"num_key_value_heads": 2, "head_dim": 8}
_LAYERS: dict[str, Any] = {
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"],
}


def huggingface(name: str, implementation: str | None = None) -> Any:
    config: Any = {
        "llama": lambda: hf.LlamaConfig(**_GROUPED),
        "t5": lambda: hf.T5Config(
            vocab_size=40, d_model=32, d_kv=8, d_ff=40, num_layers=2, num_heads=4
        ),
        "gemma2": lambda: hf.Gemma2Config(**_GROUPED, **_LAYERS, attn_logit_softcapping=2.0),
        "gemma3": lambda: hf.Gemma3TextConfig(
            **_GROUPED, **_LAYERS, attn_logit_softcapping=2.0, query_pre_attn_scalar=9
        ),
        "gpt_oss": lambda: hf.GptOssConfig(**_GROUPED, **_LAYERS, num_local_experts=4),
        "albert": lambda: hf.AlbertConfig(**_SIZES, embedding_size=16),
        "bloom": lambda: hf.BloomConfig(vocab_size=40, hidden_size=32, n_layer=2, n_head=4),
    }[name]()
    kind = hf.AutoModelForSeq2SeqLM if name == "t5" else hf.AutoModel
    if name in ("llama", "gemma2", "gemma3", "gpt_oss"):
        kind = hf.AutoModelForCausalLM
    if name == "gemma3" and implementation is None:
        implementation = "eager"  # the one that caps
    chosen = {} if implementation is None else {"attn_implementation": implementation}
    return sharp(kind.from_config(config, **chosen))


def lora(implementation: str | None = None) -> Any:
    import peft

    config = peft.LoraConfig(r=2, target_modules=["q_proj", "k_proj"], init_lora_weights=False)
    return sharp(peft.get_peft_model(huggingface("llama", implementation), config))


def compiled_forward() -> Any:
    model = sharp(Fused(CausalSelfAttention))
    model.blocks[0].forward = torch.compile(model.blocks[0].forward, backend="eager")
    return model


def encoder() -> Any:
    layer = nn.TransformerEncoderLayer(32, 4, 40, batch_first=True)
    return sharp(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))


class Translator(nn.Module):
    """Torch's transformer with padding on both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Transformer(32, 4, 2, 2, 40, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.arange(9) >= torch.tensor([[9], [6]])
        causal = nn.Transformer.generate_square_subsequent_mask(9)
        return self.body(x, x[:, :9].flip(1), tgt_mask=causal, src_key_padding_mask=hidden)


def written_out(model: Any) -> Any:
    for module in model.modules():
        if isinstance(module, FusedAttention):
            module.written_out = True
    return model


def padded(name: str) -> dict[str, Tensor]:
    mask = (torch.arange(9) < torch.tensor([[9], [6]])).long()
    mask = mask.flip(1) if name == "left" else mask
    return {"input_ids": TOKENS * mask, "attention_mask": mask}


Case = tuple[Callable[[], Any], Callable[[], Any], dict[str, Any]]
_T5_INPUTS = {**padded("right"), "decoder_input_ids": TOKENS[:, :5]}
CASES: dict[str, Case] = {
    "nanoGPT": (
        lambda: sharp(Fused(CausalSelfAttention)),
        lambda: written_out(sharp(Fused(CausalSelfAttention))),
        {"x": INPUTS},
    ),
    "nanoGPT, written out": (
        lambda: written_out(sharp(Fused(CausalSelfAttention))),
        lambda: written_out(sharp(Fused(CausalSelfAttention))),
        {"x": INPUTS},
    ),
    "ViT": (
        lambda: sharp(Fused(Attention)),
        lambda: written_out(sharp(Fused(Attention))),
        {"x": INPUTS},
    ),
    "compiled": (
        lambda: torch.compile(sharp(Fused(CausalSelfAttention)), backend="eager"),
        lambda: written_out(sharp(Fused(CausalSelfAttention))),
        {"x": INPUTS},
    ),
    "compiled Llama": (
        lambda: torch.compile(huggingface("llama"), backend="eager"),
        lambda: huggingface("llama", "eager"),
        {"input_ids": TOKENS},
    ),
    "compiled forward": (
        compiled_forward,
        lambda: written_out(sharp(Fused(CausalSelfAttention))),
        {"x": INPUTS},
    ),
    "T5": (lambda: huggingface("t5"), lambda: huggingface("t5", "eager"), _T5_INPUTS),
    "LoRA": (lora, lambda: lora("eager"), padded("left")),
    "encoder": (encoder, encoder, {"src": INPUTS}),
    "translator": (lambda: sharp(Translator()), lambda: sharp(Translator()), {"x": INPUTS}),
    **{
        f"{name}, {side} padding": (
            lambda name=name: huggingface(name),
            lambda name=name: huggingface(name, None if name == "bloom" else "eager"),
            padded(side),
        )
        for name in ("llama", "gemma2", "gemma3", "gpt_oss", "albert", "bloom")
        for side in ("left", "right")
    },
}


def entropies(model: Any, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """Entropy of each real query, (rows, H), by the name of the attention."""
    rows: dict[str, Tensor] = {}

    def see(call: AttentionCall) -> None:
        found = call.statistics()
        real_BT = ~found.logsumexp.isneginf().all(1)
        rows[call.name] = found.entropy.transpose(1, 2)[real_BT].double()

    with torch.no_grad(), watch_attention(model, see):
        model(**inputs)
    return rows


@pytest.mark.parametrize("name", CASES)
def test_entropies_are_those_of_the_softmax_written_out(name: str):
    make, make_written, inputs = CASES[name]
    model = make()
    with torch.no_grad():
        plain = first_of(model(**inputs))
    found = entropies(model, inputs)
    mask = inputs.get("attention_mask")
    real = {} if mask is None else {mask.shape[1]: mask.bool()}
    if name == "translator":
        real = {}
    written = _reference.attentions(make_written(), inputs)
    for attention in written:
        expected = attention.rows(real)
        if name == "translator" and "encoder" in attention.module:
            expected = attention.rows({9: torch.arange(9) < torch.tensor([[9], [6]])})
        assert float(expected.std()) > 0.01
        torch.testing.assert_close(found[attention.key], expected, atol=TOLERANCE, rtol=0)
    assert len(found) == len(written)
    with torch.no_grad():
        assert torch.equal(first_of(model(**inputs)), plain)
    assert is_untouched(model)


def first_of(outputs: Any) -> Tensor:
    return outputs if isinstance(outputs, Tensor) else outputs[0]


def is_untouched(model: nn.Module) -> bool:
    hooks = ("_forward_hooks", "_forward_pre_hooks")
    return not any(getattr(module, name) for module in model.modules() for name in hooks)


def test_probe_reports_every_head_of_a_fused_projection_without_a_map():
    model = sharp(Fused(CausalSelfAttention))
    found = probe(model, inputs={"x": INPUTS}, metrics=["attention_entropy"])
    rows = entropies(model, {"x": INPUTS})
    heads = [(it.module, it.head) for it in found]
    assert heads == [(f"blocks.{i}.attn", head) for i in (0, 1) for head in (None, 0, 1, 2, 3)]
    for one in found:
        own = rows[one.module] if one.head is None else rows[one.module][:, one.head]
        assert one.value == pytest.approx(float(own.mean()), abs=TOLERANCE)


def test_half_precision_and_autocast():
    model, inputs = huggingface("llama"), padded("right")
    expected = entropies(model, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = entropies(model, inputs)
    half = entropies(huggingface("llama").to(torch.bfloat16), inputs)
    for found in (mixed, half):
        for name, rows in expected.items():
            assert float((found[name] - rows).abs().mean()) < 0.02


def test_training_with_checkpointing_and_dropout_is_as_without():
    model = huggingface("llama")
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.3
    model.train()
    enable_checkpointing(model)
    losses, gradients, tap = [], [], None
    for watching in (False, True):
        torch.manual_seed(3)
        model.zero_grad()
        with contextlib.ExitStack() as stack:
            if watching:
                tap = stack.enter_context(watch_attention(model, lambda call: None))
            loss = model(TOKENS, labels=TOKENS, use_cache=False).loss
            loss.backward()
        losses.append(loss.detach())
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert torch.equal(*losses)
    assert all(map(torch.equal, *gradients))
    assert tap is not None
    assert tap.calls == 2  # what checkpointing computes again is not seen again


def test_fused_implementations_are_switched_and_switched_back():
    model = huggingface("llama")
    expected = entropies(model, padded("left"))
    model.config._attn_implementation = "flash_attention_2"  # cannot run here
    found = entropies(model, padded("left"))
    assert model.config._attn_implementation == "flash_attention_2"
    for name, rows in expected.items():
        torch.testing.assert_close(found[name], rows, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("kind", ["self", "cross"])
@pytest.mark.parametrize("mask", ["none", "bool", "numbers", "padding"])
def test_multihead_attention(kind: str, mask: str, weights: bool, batch_first: bool):
    keys = 7 if kind == "self" else 9
    sizes: dict[str, Any] = {} if kind == "self" else {"kdim": 20, "vdim": 12}
    module = sharp(nn.MultiheadAttention(32, 4, batch_first=batch_first, **sizes))
    generator = torch.Generator().manual_seed(6)
    query = torch.randn(2, 7, 32, generator=generator)
    key = query if kind == "self" else torch.randn(2, 9, 20, generator=generator)
    value = query if kind == "self" else torch.randn(2, 9, 12, generator=generator)
    if not batch_first:
        query, key, value = (it.transpose(0, 1) for it in (query, key, value))
    hidden = torch.ones(7, keys).triu(2) > 0
    given: dict[str, Any] = {
        "none": {},
        "bool": {"attn_mask": hidden},
        "numbers": {"attn_mask": torch.randn(7, keys, generator=generator)},
        "padding": {"key_padding_mask": torch.arange(keys) >= torch.tensor([[keys], [5]])},
    }[mask]
    calls: list[AttentionCall] = []
    with torch.no_grad():
        plain, written = module(query, key, value, **given, average_attn_weights=False)
        with watch_attention(module, calls.append):
            found = module(query, key, value, **given, need_weights=weights)[0]
    torch.testing.assert_close(found, plain)
    (call,) = calls
    assert call.kind == kind
    rows = call.statistics()
    real_BHT = ~rows.logsumexp.isneginf()
    assert bool(real_BHT.all()) == (kind == "cross" or mask != "padding")
    expected = -torch.special.xlogy(written, written).sum(-1)
    torch.testing.assert_close(rows.entropy[real_BHT], expected[real_BHT], atol=TOLERANCE, rtol=0)


def test_kinds_tell_towers_and_cross_attention_apart():
    kinds: dict[str, str] = {}
    for make, inputs in ((CASES["T5"][0], _T5_INPUTS), (CASES["translator"][0], {"x": INPUTS})):
        model = make()
        with watch_attention(model, lambda call: kinds.update({call.name: call.kind})):
            model(**inputs)
    assert kinds["encoder.block.1.layer.0.SelfAttention"] == "encoder self"
    assert kinds["decoder.block.1.layer.1.EncDecAttention"] == "decoder cross"
    assert kinds["body.decoder.layers.0.self_attn"] == "decoder self"
    assert kinds["body.decoder.layers.0.multihead_attn"] == "decoder cross"


class Written(nn.Module):
    """Attention of a name nobody knows, written out by hand; queries and keys can be named."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {"q": nn.Linear(32, 32), "k": nn.Linear(32, 16), "qkv": nn.Linear(32, 96)}
            )
            for _ in range(2)
        )

    def forward(self, x: Tensor, fused: bool = False) -> list[Tensor]:
        every = []
        for block in self.blocks:
            layer: Any = block
            query, key = (
                layer["qkv"](x).chunk(3, -1)[:2] if fused else (layer["q"](x), layer["k"](x))
            )
            query = query.unflatten(-1, (4, 8)).transpose(1, 2)
            key = key.unflatten(-1, (-1, 8)).transpose(1, 2)
            every.append((query @ key.repeat_interleave(4 // key.shape[1], 1).mT).softmax(-1))
            x = x + every[-1].mean(1) @ x
        return every


@pytest.mark.parametrize("fused", [False, True])
def test_attention_written_by_hand_by_a_map(fused: bool):
    model = sharp(Written())
    parts: dict[str, Any] = {"query": "blocks.{layer}.q", "key": "blocks.{layer}.k", "key_heads": 2}
    if fused:
        both = "blocks.{layer}.qkv"
        parts = {"query": both, "key": both, "query_part": Part(0, 3), "key_part": Part(1, 3)}
    names = AttentionMap(heads=4, causal=False, scale=1.0, **parts)
    calls: list[AttentionCall] = []
    with torch.no_grad(), watch_attention(model, calls.append, names=names):
        written = model(INPUTS, fused)
    assert [call.layer for call in calls] == [0, 1]
    for call, attention in zip(calls, written, strict=True):
        expected = -torch.special.xlogy(attention, attention).sum(-1)
        torch.testing.assert_close(call.statistics().entropy, expected, atol=TOLERANCE, rtol=0)


def test_mistakes_are_told_in_one_sentence():
    model = sharp(Written())
    with (
        pytest.raises(JomaError, match=r"no attention of Written was seen.*AttentionMap\("),
        watch_attention(model, lambda call: None),
    ):
        model(INPUTS)
    for names, words in (
        (AttentionMap("blocks.{layer}.q", "layers.{layer}.k", 4), r"got layers \[0, 1\] at"),
        (AttentionMap("blocks.{layer}.q", "blocks.{layer}.k", 5), r"\(B, T, 5 · D\)"),
    ):
        with (
            pytest.raises(JomaError, match=words),
            watch_attention(model, lambda call: None, names=names),
        ):
            model(INPUTS)
    model.rotary_emb = nn.Identity()
    model.register_buffer("inv_freq", torch.ones(4))
    names = AttentionMap("blocks.{layer}.q", "blocks.{layer}.k", 4)
    with (
        pytest.raises(JomaError, match="the model rotates them"),
        watch_attention(model, lambda call: None, names=names),
    ):
        model(INPUTS)
    with pytest.raises(JomaError, match=r"query must have \{layer\} once"):
        AttentionMap("q", "k.{layer}", 2)
    with pytest.raises(JomaError, match="which parts of"):
        AttentionMap("q.{layer}", "q.{layer}", 2)


# Taps that act

ACTED: dict[str, tuple[Callable[[], Any], Tensor, str]] = {
    "nanoGPT": (lambda: sharp(Fused(CausalSelfAttention)), INPUTS, "blocks.{}.attn.proj"),
    "eager": (lambda: huggingface("llama", "eager"), TOKENS, "model.layers.{}.self_attn.o_proj"),
    "sdpa": (lambda: huggingface("llama", "sdpa"), TOKENS, "model.layers.{}.self_attn.o_proj"),
    "gemma3": (lambda: huggingface("gemma3"), TOKENS, "model.layers.{}.self_attn.o_proj"),
    "gpt_oss": (lambda: huggingface("gpt_oss"), TOKENS, "model.layers.{}.self_attn.o_proj"),
}


def output_of(model: Any, inputs: Tensor) -> Tensor:
    with torch.no_grad():
        return first_of(model(inputs))


def doubled(layer: int) -> Callable[[AttentionCall], Tensor | None]:
    return lambda call: 2 * call.result if call.layer == layer else None


def turned(layer: int) -> Callable[[AttentionCall], Tensor | None]:
    return lambda call: call.result.flip(2) if call.layer == layer else None


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("name", ACTED)
def test_a_replaced_result_is_what_the_model_goes_on_with(name: str, layer: int):
    make, inputs, projection = ACTED[name]
    model = make()
    plain = output_of(model, inputs)
    with tap_attention(model, turned(layer)) as tap:
        found = output_of(model, inputs)
    assert tap.calls == 2
    handle = model.get_submodule(projection.format(layer)).register_forward_pre_hook(
        lambda module, args: (args[0].flip(1),)
    )
    expected = output_of(model, inputs)
    handle.remove()
    assert float((found - plain).abs().max()) > 1e-4
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    with tap_attention(model, lambda call: None):
        assert torch.equal(output_of(model, inputs), plain)
    assert is_untouched(model)


@pytest.mark.parametrize("weights", [False, True])
def test_the_result_of_multihead_attention_is_replaced(weights: bool):
    module = sharp(nn.MultiheadAttention(32, 4, batch_first=True))
    with torch.no_grad(), tap_attention(module, lambda call: torch.zeros_like(call.result)):
        found, attention = module(INPUTS, INPUTS, INPUTS, need_weights=weights)
    torch.testing.assert_close(found, module.out_proj.bias.expand_as(found))
    assert (attention is not None) == weights


def test_the_result_is_computed_only_where_it_is_wanted(monkeypatch: pytest.MonkeyPatch):
    """A cache computes attention itself: from what it is given, before the model does."""
    model = huggingface("llama")
    plain = output_of(model, TOKENS)
    computed: list[str] = []
    own = sdpa_attention.repeat_kv
    monkeypatch.setattr(sdpa_attention, "repeat_kv", lambda *a: computed.append("") or own(*a))

    def again(call: AttentionCall) -> Tensor:
        assert call.value is not None
        groups = call.query.shape[1] // call.key.shape[1]
        key, value = (it.repeat_interleave(groups, 1) for it in (call.key, call.value))
        return nn.functional.scaled_dot_product_attention(
            call.query, key, value, call.mask, is_causal=call.causal, scale=call.scale
        )

    with tap_attention(model, again):
        found = output_of(model, TOKENS)
    torch.testing.assert_close(found, plain)
    assert not computed


def test_taps_nest_and_each_gets_the_result_as_those_before_left_it():
    model = huggingface("llama")
    seen: dict[str, Tensor] = {}

    def observer(where: str) -> Callable[[AttentionCall], None]:
        def see(call: AttentionCall) -> None:
            if call.layer == 0:
                seen[where] = call.result

        return see

    with (
        watch_attention(model, observer("before")),
        tap_attention(model, doubled(0)),
        watch_attention(model, observer("between")),
        tap_attention(model, doubled(0)),
        watch_attention(model, observer("after")),
    ):
        output_of(model, TOKENS)
    assert torch.equal(2 * seen["before"], seen["between"])
    assert torch.equal(4 * seen["before"], seen["after"])
    assert is_untouched(model)


def test_replacements_that_do_not_fit_are_refused():
    model = huggingface("llama")
    for wrong in (lambda call: call.result[..., :1], str):
        with (
            pytest.raises(JomaError, match="handler must return None or a tensor for"),
            tap_attention(model, wrong),  # pyright: ignore[reportArgumentType]
        ):
            output_of(model, TOKENS)
    bloom = huggingface("bloom")
    with (
        pytest.raises(JomaError, match="replaced: it computes attention in a way"),
        tap_attention(bloom, lambda call: call.query),
    ):
        output_of(bloom, TOKENS)


def test_an_error_leaves_nothing_behind():
    model = huggingface("llama")
    plain, own = output_of(model, TOKENS), hf.AttentionInterface.get_interface

    def fail(call: AttentionCall) -> Any:
        raise KeyError("broken")

    for _ in range(2):
        with pytest.raises(KeyError, match="broken"), tap_attention(model, fail):
            output_of(model, TOKENS)
        assert is_untouched(model)
        assert hf.AttentionInterface.get_interface is own
    assert torch.equal(output_of(model, TOKENS), plain)


def test_threads_see_what_they_run_themselves():
    models = [huggingface("llama"), huggingface("llama")]
    expected = []
    for layer, model in enumerate(models):
        with tap_attention(model, doubled(layer)):
            expected.append(output_of(model, TOKENS))
    plain = output_of(models[0], TOKENS)
    barrier = threading.Barrier(3, timeout=120)
    found: dict[int, list[Tensor]] = {0: [], 1: [], 2: []}

    def run(number: int) -> None:
        for _ in range(5):
            barrier.wait()
            with contextlib.ExitStack() as stack:
                if number < 2:
                    stack.enter_context(tap_attention(models[number], doubled(number)))
                found[number].append(output_of(models[number % 2], TOKENS))

    threads = [threading.Thread(target=run, args=(number,)) for number in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for number, outputs in found.items():
        assert len(outputs) == 5
        wanted = plain if number == 2 else expected[number]
        assert all(torch.equal(one, wanted) for one in outputs)
    assert all(map(is_untouched, models))


def test_calls_are_not_kept_alive():
    model = huggingface("llama")
    calls: list[weakref.ref[AttentionCall]] = []
    with watch_attention(model, lambda call: calls.append(weakref.ref(call))):
        model(TOKENS)
    gc.collect()
    assert [call() for call in calls] == [None, None]


def test_taps_that_end_in_another_order_leave_compiled_code_compiled():
    from torch._dynamo import eval_frame

    model, x, before = nn.MultiheadAttention(8, 2), torch.randn(3, 1, 8), eval_frame._stance
    first, second = (watch_attention(model, lambda call: None) for _ in range(2))
    with first:
        second.__enter__()
        model(x, x, x)
        assert eval_frame._stance.stance == "force_eager"
    second.__exit__(None, None, None)
    assert eval_frame._stance == before
