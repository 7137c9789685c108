"""One tap on the attention of any model: observe it, or replace its result, while the model runs.

It works on Hugging Face models, whatever attention implementation they use, on
`nn.MultiheadAttention` and torch's encoder and decoder layers, and on other modules through an
`AttentionMap`. Taps nest, may end in any order, may be used from several threads, and leave nothing
behind.

- `watch_attention`: call a function with queries and keys of every attention. Outputs, gradients
  and random numbers are those of a model without a tap, bit for bit.
- `tap_attention`: the same, and what the function returns takes the place of attention's result.
- `AttentionCall`: what the function gets. `Tap`: what was seen so far.
- `AttentionMap`: where queries and keys are made, for a model that does not say it itself.

`stack.py` holds the taps in place and follows forward passes; `huggingface.py`, `multihead.py` and
`named.py` each find one kind of attention in a model.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from joma.errors import JomaError
from joma.probes.tap import huggingface, multihead, named
from joma.probes.tap.call import HOW, AttentionCall, Handler
from joma.probes.tap.named import AttentionMap
from joma.probes.tap.stack import Tap

__all__ = [
    "AttentionCall",
    "AttentionMap",
    "Handler",
    "Tap",
    "tap_attention",
    "watch_attention",
]


@contextmanager
def watch_attention(
    model: nn.Module, see: Callable[[AttentionCall], Any], *, names: AttentionMap | None = None
) -> Iterator[Tap]:
    """Call `see` with the queries and keys of every attention the model computes in the block.

        with watch_attention(model, see) as tap:
            model(tokens)

    Everything is undone at the end, also after an error. Rows hidden altogether (the left padding
    of a batch) see no key, whatever the implementation makes of them. What gradient checkpointing
    computes a second time is not seen again.

    Args:
        model: Any module that is not compiled.
        see: Called with each `AttentionCall` when it has been computed, without gradients; it may
            call `call.statistics()`. What it returns is ignored.
        names: Where queries and keys are made, for a model that does not say it itself.

    Raises:
        JomaError: The model is of no kind that can be watched, or nothing was seen by the end.
    """
    with _tapped(Tap(model, see, acts=False), model, names) as tap:
        yield tap
    if not tap.calls:
        raise JomaError(
            f"no attention of {type(model).__name__} was seen: either it did not run, or it "
            f"computes attention in a way of its own: {HOW}"
        )


@contextmanager
def tap_attention(
    model: nn.Module, handler: Handler, *, names: AttentionMap | None = None
) -> Iterator[Tap]:
    """Call `handler` with every attention of the model; what it returns replaces the result.

        def handler(call):
            return torch.zeros_like(call.result) if call.layer == 3 else None

        with tap_attention(model, handler):
            model(tokens)

    Of several taps on one model, the one entered first is called first, and each gets the result as
    those before it left it. Everything is undone at the end, also after an error. While the block
    lasts, torch's encoder layers do not take their fused path, which has no result of attention to
    replace. What gradient checkpointing computes a second time is handled a second time.

    Args:
        model: Any module that is not compiled.
        handler: Called with each `AttentionCall` when it has been computed, without gradients.
            Returns None to leave `call.result`, or a tensor of its shape, type and device. No
            gradient flows through the replacement.
        names: Where queries, keys and `output` are made, for a model that does not say it itself.

    Raises:
        JomaError: The model is of no kind that can be tapped, or a replacement does not fit.
    """
    with _tapped(Tap(model, handler, acts=True), model, names) as tap:
        yield tap


@contextmanager
def _tapped(tap: Tap, model: nn.Module, names: AttentionMap | None) -> Iterator[Tap]:
    if any(_is_compiled(module) for module in model.modules()):
        raise JomaError(
            "model must not be compiled to be watched: run one that is not now and then"
        )
    with ExitStack() as stack:
        if names is not None:
            stack.enter_context(named.tapped(model, names, tap))
        else:
            found = [stack.enter_context(it.tapped(model, tap)) for it in (huggingface, multihead)]
            if not any(found):
                raise JomaError(
                    f"model must be a Hugging Face model or hold nn.MultiheadAttention to be "
                    f"watched, got {type(model).__name__}: {HOW}"
                )
        stack.enter_context(tap.following(model))  # last: a pass is around all that it holds
        yield tap


def _is_compiled(module: nn.Module) -> bool:
    call = getattr(module, "_compiled_call_impl", None)
    in_place = call is not None and not getattr(call, "is_uncompiled", False)
    return in_place or hasattr(module, "_orig_mod")
