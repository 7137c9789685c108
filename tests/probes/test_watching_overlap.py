"""Watches that overlap, end in any order, or run next to other threads."""

import copy
import pickle
import threading
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from joma.probes.tap import AttentionCall, watch_attention
from joma.probes.tap.stack import taps

INPUTS = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 20, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


def attention() -> nn.Module:
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attend = nn.MultiheadAttention(16, 2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.attend(x, x, x)[0]

    return Alone().eval()


def llama() -> Any:
    config = hf.LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    return hf.LlamaForCausalLM(config).eval()


def bloom() -> Any:
    return hf.BloomModel(hf.BloomConfig(vocab_size=40, hidden_size=16, n_layer=2, n_head=2)).eval()


MODELS = {
    "encoder": (encoder, INPUTS, 2),
    "attention": (attention, INPUTS, 1),
    "llama": (llama, torch.arange(10).view(2, 5), 2),
    "bloom": (bloom, torch.arange(10).view(2, 5), 2),
}


def is_untouched(model: nn.Module) -> bool:
    return not any(
        "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks
        for module in model.modules()
    )


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
def test_overlapping_watches_end_in_any_order(name: str, order: tuple[int, ...]):
    build, inputs, each = MODELS[name]
    model = build()
    seen: list[list[AttentionCall]] = [[], [], []]
    watches = [watch_attention(model, one.append) for one in seen]
    with torch.no_grad():
        for watch in watches:
            watch.__enter__()
        model(inputs)
        for ended, number in enumerate(order, 1):
            watches[number].__exit__(None, None, None)
            if ended < len(order):
                model(inputs)
    for number, calls in enumerate(seen):
        assert len(calls) == each * (1 + order.index(number))
        assert all(call.pass_index == 0 for call in calls)
    assert is_untouched(model)
    assert not taps


@pytest.mark.parametrize("name", MODELS)
def test_nested_watches_see_the_same(name: str):
    build, inputs, _ = MODELS[name]
    model = build()
    entropies: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    with torch.no_grad(), ExitStack() as stack:
        plain = model(inputs)
        for one in entropies:
            see = one.append
            stack.enter_context(
                watch_attention(model, lambda call, see=see: see(call.statistics().entropy))
            )
        found = model(inputs)
    plain, found = (x[0] if isinstance(x, tuple | dict) else x for x in (plain, found))
    assert torch.equal(plain, found)
    for one, other in zip(*entropies, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", MODELS)
def test_an_error_in_the_model_leaves_nothing_behind(name: str):
    build, inputs, each = MODELS[name]
    model = build()
    last = [module for module in model.modules() if isinstance(module, nn.LayerNorm)]
    broken = (
        last[-1] if last else model.get_submodule("attend" if name == "attention" else "model.norm")
    )

    def fail(module: nn.Module, args: Any) -> None:
        raise KeyError("broken")

    own = hf.AttentionInterface.get_interface
    calls: list[AttentionCall] = []
    handle = broken.register_forward_pre_hook(fail)
    with pytest.raises(KeyError, match="broken"), watch_attention(model, calls.append):
        model(inputs)
    handle.remove()
    assert is_untouched(model)
    assert hf.AttentionInterface.get_interface is own
    calls.clear()
    with watch_attention(model, calls.append):
        model(inputs)
    assert len(calls) == each


def test_a_thread_may_run_another_model_while_a_watch_ends():
    watched, other = llama(), llama()
    started, ended = threading.Event(), threading.Event()
    failures: list[BaseException] = []

    def run() -> None:
        try:
            own = hf.AttentionInterface.get_interface  # ours, while the watch is on
            started.set()
            assert ended.wait(120)
            function = own(hf.AttentionInterface(), "sdpa", lambda: None)
            assert callable(function)
            other(torch.arange(10).view(2, 5))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    with watch_attention(watched, lambda call: None):
        thread.start()
        assert started.wait(120)
        watched(torch.arange(10).view(2, 5))
    ended.set()
    thread.join(120)
    assert not failures


@pytest.mark.parametrize("name", MODELS)
def test_a_wrapper_of_somebody_else_stays(name: str):
    """Somebody wraps `forward` during a watch and keeps it longer."""
    build, inputs, each = MODELS[name]
    model = build()
    target = next(m for m in model.modules() if "ttention" in type(m).__name__)
    calls: list[AttentionCall] = []
    count = 0
    with watch_attention(model, calls.append):
        inner = target.forward

        def outer(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            return inner(*args, **kwargs)

        target.forward = outer
        with torch.no_grad():
            model(inputs)
    assert count == 1 or name == "encoder"  # an encoder layer goes past its attention module
    assert len(calls) == each
    model(inputs)
    assert len(calls) == each


@pytest.mark.parametrize("name", ["encoder", "llama", "bloom"])
@pytest.mark.parametrize("how", ["copy", "pickle"])
def test_a_copy_made_during_a_watch_is_a_model_of_its_own(name: str, how: str):
    build, inputs, each = MODELS[name]
    model = build()
    calls: list[AttentionCall] = []
    with torch.no_grad(), watch_attention(model, calls.append):
        twin = copy.deepcopy(model) if how == "copy" else pickle.loads(pickle.dumps(model))
        for parameter in twin.parameters():
            parameter.zero_()
        found = twin(inputs)
        found = found[0] if isinstance(found, tuple | dict) else found
        assert not found.any()  # its own weights were used
        assert not calls
        model(inputs)
    assert len(calls) == each
