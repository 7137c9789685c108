"""Taps that act: a handler replaces what attention computed, alone and together with others."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from joma.errors import JomaError
from joma.models import enable_checkpointing
from joma.probes import AttentionMap, tap_attention, watch_attention
from joma.probes.tap import AttentionCall, stack

TOKENS = torch.arange(10).view(2, 5)
INPUTS = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))


def _doubled(module: torch.nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
    return 2 * output


def llama(implementation: str = "sdpa") -> nn.Module:
    config = hf.LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    return hf.AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()


def bloom() -> nn.Module:
    return hf.BloomModel(hf.BloomConfig(vocab_size=40, hidden_size=16, n_layer=2, n_head=2)).eval()


def encoder(nested: bool = False) -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 20, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested).eval()


class Attention(nn.Module):
    """Attention with modules that a user can name."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            make(x).unflatten(-1, (2, 8)).transpose(1, 2) for make in (self.q, self.k, self.v)
        )
        found = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return found.transpose(1, 2).flatten(2)


class Multihead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.MultiheadAttention(16, 2, batch_first=True) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, x, x)[0]
        return x


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


NAMES = AttentionMap(
    query="blocks.{layer}.q", key="blocks.{layer}.k", heads=2, output="blocks.{layer}"
)
MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor, AttentionMap | None]] = {
    "eager": (lambda: llama("eager"), TOKENS, None),
    "sdpa": (llama, TOKENS, None),
    "bloom": (bloom, TOKENS, None),
    "multihead": (Multihead, INPUTS, None),
    "encoder": (encoder, INPUTS, None),
    "named": (Named, INPUTS, NAMES),
}


def output_of(model: nn.Module, inputs: Tensor) -> Tensor:
    with torch.no_grad():
        found = model(inputs)
    return found[0] if isinstance(found, tuple | dict) else found


def doubled(layer: int) -> Callable[[AttentionCall], Tensor | None]:
    def handler(call: AttentionCall) -> Tensor | None:
        assert call.result is not None
        return 2 * call.result if call.layer == layer else None

    return handler


def is_untouched(model: nn.Module) -> bool:
    return not any(
        "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks
        for module in model.modules()
    )


def by_hand(model: nn.Module, inputs: Tensor, layer: int) -> Tensor:
    """The output with the result of one layer's attention doubled by other means."""
    projections = {
        "LlamaForCausalLM": "model.layers.{}.self_attn.o_proj",
        "BloomModel": "h.{}.self_attention.dense",
        "TransformerEncoder": "layers.{}.dropout1",
        "Multihead": "layers.{}",
        "Named": "blocks.{}",
    }
    module = model.get_submodule(projections[type(model).__name__].format(layer))
    if isinstance(model, Named):
        handle = module.register_forward_hook(_doubled)
    elif isinstance(model, Multihead):
        handle = module.register_forward_hook(lambda module, args, output: (2 * output[0], None))
    else:

        def double(module: nn.Module, args: Any) -> Any:
            return (2 * args[0], *args[1:])

        handle = module.register_forward_pre_hook(double)
    found = output_of(model, inputs)
    handle.remove()
    return found


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("name", MODELS)
def test_a_replaced_result_is_what_the_model_goes_on_with(name: str, layer: int):
    build, inputs, names = MODELS[name]
    model = build()
    plain = output_of(model, inputs)
    with tap_attention(model, doubled(layer), names=names) as tap:
        found = output_of(model, inputs)
    assert tap.calls == 2
    assert (found - plain).abs().max() > 1e-4
    torch.testing.assert_close(found, by_hand(model, inputs, layer), atol=1e-5, rtol=1e-5)
    assert is_untouched(model)
    assert torch.equal(output_of(model, inputs), plain)


@pytest.mark.parametrize("name", MODELS)
def test_a_handler_that_returns_nothing_changes_nothing(name: str):
    build, inputs, names = MODELS[name]
    model = build()
    plain = output_of(model, inputs)
    with tap_attention(model, lambda call: None, names=names):
        found = output_of(model, inputs)
    if name == "encoder":  # the fused path is off, which rounds differently
        torch.testing.assert_close(found, plain)
    else:
        assert torch.equal(found, plain)


def test_an_encoder_that_would_nest_its_tensors_can_be_acted_on():
    model = encoder(nested=True)
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 3:] = True
    with torch.no_grad(), tap_attention(model, doubled(0)) as tap:
        found = model(INPUTS, src_key_padding_mask=padding)
    assert tap.calls == 2
    assert found[~padding].isfinite().all()


@pytest.mark.parametrize("name", MODELS)
def test_an_observer_sees_the_result_as_the_taps_before_it_left_it(name: str):
    build, inputs, names = MODELS[name]
    model = build()
    seen: dict[str, Tensor] = {}

    def observer(where: str) -> Callable[[AttentionCall], None]:
        def see(call: AttentionCall) -> None:
            if call.layer == 0 and call.result is not None:
                seen[where] = call.result

        return see

    with (
        watch_attention(model, observer("before"), names=names),
        tap_attention(model, doubled(0), names=names),
        watch_attention(model, observer("between"), names=names),
        tap_attention(model, doubled(0), names=names),
        watch_attention(model, observer("after"), names=names),
    ):
        output_of(model, inputs)
    assert torch.equal(2 * seen["before"], seen["between"])
    assert torch.equal(4 * seen["before"], seen["after"])
    assert is_untouched(model)


@pytest.mark.parametrize("name", MODELS)
def test_threads_act_on_models_of_their_own(name: str):
    build, inputs, names = MODELS[name]
    models = [build() for _ in range(2)]
    expected = []
    for layer, model in enumerate(models):
        with tap_attention(model, doubled(layer), names=names):
            expected.append(output_of(model, inputs))
    barrier = threading.Barrier(2)
    found: dict[int, list[Tensor]] = {0: [], 1: []}
    failures: list[BaseException] = []

    def run(layer: int) -> None:
        try:
            for _ in range(5):
                barrier.wait(120)
                with tap_attention(models[layer], doubled(layer), names=names):
                    found[layer].append(output_of(models[layer], inputs))
        except BaseException as error:
            barrier.abort()
            failures.append(error)

    threads = [threading.Thread(target=run, args=(layer,)) for layer in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures
    for layer in (0, 1):
        assert all(torch.equal(one, expected[layer]) for one in found[layer])
        assert is_untouched(models[layer])
    assert not stack.taps


@pytest.mark.parametrize("name", MODELS)
def test_two_threads_run_one_model_under_one_tap(name: str):
    build, inputs, names = MODELS[name]
    model = build()
    found: list[Tensor] = []
    with tap_attention(model, doubled(1), names=names) as tap:
        expected = output_of(model, inputs)
        threads = [
            threading.Thread(target=lambda: found.append(output_of(model, inputs)))
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    assert tap.calls == 6
    assert len(found) == 2
    assert all(torch.equal(one, expected) for one in found)


@pytest.mark.parametrize("name", MODELS)
def test_an_error_in_a_handler_leaves_nothing_behind(name: str):
    build, inputs, names = MODELS[name]
    model = build()
    plain, own = output_of(model, inputs), hf.AttentionInterface.get_interface

    def fail(call: AttentionCall) -> Any:
        raise KeyError("broken")

    for _ in range(2):
        with pytest.raises(KeyError, match="broken"), tap_attention(model, fail, names=names):
            output_of(model, inputs)
        assert is_untouched(model)
        assert hf.AttentionInterface.get_interface is own
        assert not stack.taps
    assert torch.equal(output_of(model, inputs), plain)


@pytest.mark.parametrize("name", MODELS)
def test_a_replacement_that_does_not_fit_is_refused(name: str):
    build, inputs, names = MODELS[name]
    model = build()

    def wrong(call: AttentionCall) -> Any:
        assert call.result is not None
        return call.result[..., :1]

    with (
        pytest.raises(JomaError, match="handler must return None or a tensor for"),
        tap_attention(model, wrong, names=names),
    ):
        output_of(model, inputs)
    with pytest.raises(JomaError, match="got str"), tap_attention(model, str, names=names):  # type: ignore[arg-type]
        output_of(model, inputs)


def test_named_modules_without_an_output_can_only_be_observed():
    model, names = Named(), AttentionMap("blocks.{layer}.q", "blocks.{layer}.k", 2)
    with (
        pytest.raises(JomaError, match=r"the result of blocks\.0\.q cannot be replaced"),
        tap_attention(model, lambda call: call.query, names=names),
    ):
        output_of(model, INPUTS)
    wrong = AttentionMap("blocks.{layer}.q", "blocks.{layer}.k", 2, output="other.{layer}")
    with (
        pytest.raises(JomaError, match=r"the output of layers 0, 1, got none at 'other"),
        tap_attention(model, lambda call: None, names=wrong),
    ):
        output_of(model, INPUTS)


def test_what_a_watcher_returns_is_ignored():
    model = llama()
    plain = output_of(model, TOKENS)
    with watch_attention(model, lambda call: call.query):
        found = output_of(model, TOKENS)
    assert torch.equal(found, plain)


def test_values_are_handed_over_so_that_attention_can_be_computed_again():
    model = llama()
    plain = output_of(model, TOKENS)

    def again(call: AttentionCall) -> Tensor:
        assert call.value is not None
        found = nn.functional.scaled_dot_product_attention(
            call.query, call.key, call.value, call.mask, is_causal=call.causal, scale=call.scale
        )
        return found.transpose(1, 2).contiguous()

    with tap_attention(model, again):
        found = output_of(model, TOKENS)
    assert torch.equal(found, plain)


def test_checkpointing_computes_with_the_replacement_again():
    model = llama()
    model.train()
    inputs = model.get_input_embeddings()(TOKENS).detach().requires_grad_()  # type: ignore[operator]
    gradients = []
    for checkpointed in (False, True):
        if checkpointed:
            enable_checkpointing(model)
        with tap_attention(model, doubled(0)):
            loss = model(inputs_embeds=inputs).logits.square().sum()
            gradients.append(torch.autograd.grad(loss, inputs)[0])
    assert torch.equal(*gradients)


def test_deprecated_names_still_work():
    import joma.probes

    with pytest.warns(DeprecationWarning, match="Watch is deprecated, use Tap"):
        assert joma.probes.Watch is joma.probes.Tap
    from joma.probes import watching

    with pytest.warns(DeprecationWarning, match=r"use joma\.probes\.tap"):
        assert watching.watch_attention is watch_attention
