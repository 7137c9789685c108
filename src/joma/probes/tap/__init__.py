"""One tap on the attention of any model: observe it, or replace its result, while the model runs.

- `watch_attention`: call a function with queries and keys of every attention.
- `tap_attention`: the same, and what the function returns takes the place of attention's result.
- `AttentionCall`: what the function gets. `Tap`: what was seen so far.
- `AttentionMap`: where queries and keys are made, for a model whose attention nobody can see.

How it works. A model computes attention by one of three functions, and all three lead here:
`scaled_dot_product_attention`, the function that Hugging Face's attention interface chooses, and
the softmax that a module whose class is called an attention takes itself. A torch function mode
sees the first and the last, and so does `nn.MultiheadAttention`, which calls
them; the interface is wrapped, for there keys are not yet repeated and softcap and sinks are known.
Forward hooks keep a stack of the modules that run, which says which attention it is. Each call is
handed over before it is computed, with queries and keys as computed, after rotation; what the
handler returns makes computing it unnecessary. Fused implementations (flash, flex) are replaced by
the library's plain ones, compiled models run uncompiled, and torch's encoder layers take no fused
path while a tap is in place. At the end hooks, mode, interface and implementation are undone.

A tap sees what runs in the thread that entered it. Rows hidden altogether (left padding) see no
key, whatever the implementation makes of them, and tokens that no query sees are padding.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from joma.errors import JomaError
from joma.probes.tap._call import AttentionCall, Handler
from joma.probes.tap._functions import observed_functions
from joma.probes.tap._named import AttentionMap, named_attention
from joma.probes.tap._taps import Tap
from joma.probes.tap._transformers import observed_interface

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

    Everything is undone at the end, also after an error. What gradient checkpointing computes a
    second time is not seen again.

    Args:
        model: Any module.
        see: Called with each `AttentionCall`, without gradients; it may call `call.statistics()`.
            What it returns is ignored.
        names: Where queries and keys are made, for a model that does not say it itself.

    Raises:
        JomaError: Attention was computed in a way that cannot be seen, or none was seen by the end.
    """
    with _tapped(Tap(model, see, acts=False), model, names) as tap:
        yield tap
    if not tap.calls:
        raise JomaError(
            f"no attention of {type(model).__name__} was seen: either it did not run, it has none, "
            "or it computes it in a way of its own: say where its queries and keys are made, such "
            "as names=AttentionMap(query='blocks.{layer}.q', key='blocks.{layer}.k', heads=8)"
        )


@contextmanager
def tap_attention(
    model: nn.Module, handler: Handler, *, interface_alone: bool = False
) -> Iterator[Tap]:
    """Call `handler` with every attention of the model; what it returns replaces the result.

        def handler(call):
            return torch.zeros_like(call.result) if call.layer == 3 else None

        with tap_attention(model, handler):
            model(tokens)

    The result is computed only where the handler asks for `call.result` or returns None. Of several
    taps on one model, the one entered first is called first, and each gets the result as those
    before it left it. Everything is undone at the end, also after an error. Not for
    training with gradient checkpointing, which may compute a second time in another thread.

    Args:
        model: Any module.
        handler: Called with each `AttentionCall`, without gradients. Returns None to leave the
            result, or one of its own, (B, H, T, Dv). No gradient flows through the replacement.
        interface_alone: Whether only attention that Hugging Face's interface computes is seen.
            Torch's functions, of which all others are slower meanwhile, are not watched then.

    Raises:
        JomaError: A replacement does not fit, or cannot take the place of what a module computes.
    """
    tap = Tap(model, handler, acts=True, interface_alone=interface_alone)
    with _tapped(tap, model, None):
        yield tap


_lock = threading.Lock()
_eager, _blocks = ExitStack(), 0


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Run compiled code uncompiled; blocks may end in any order, and the last one restores."""
    global _blocks
    with _lock:
        if not _blocks and "torch._dynamo" in sys.modules:  # else nothing is compiled
            _eager.enter_context(torch.compiler.set_stance("force_eager"))
        _blocks += 1
    try:
        yield
    finally:
        with _lock:
            _blocks -= 1
            if not _blocks:
                _eager.close()


@contextmanager
def _tapped(tap: Tap, model: nn.Module, names: AttentionMap | None) -> Iterator[Tap]:
    with ExitStack() as stack:
        stack.enter_context(_uncompiled())
        if names is None:
            stack.enter_context(observed_interface(model))
            stack.enter_context(observed_functions(tap))
        else:
            stack.enter_context(named_attention(model, names, tap))
        stack.enter_context(tap.following(model))
        yield tap
