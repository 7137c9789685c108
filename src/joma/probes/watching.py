"""Watching a model attend: queries and keys of every layer, while the model runs as it would.

Works on Hugging Face models, whatever attention implementation they use, on `nn.MultiheadAttention`
and `nn.TransformerEncoder`, and on other modules through an `AttentionMap`. Outputs, gradients and
random numbers are those of a model that is not watched.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

from joma.errors import JomaError
from joma.probes import _watch_hf, _watch_named, _watch_torch
from joma.probes._watch_call import HOW, AttentionCall, Watch
from joma.probes._watch_named import AttentionMap
from joma.probes._watch_pass import Passes

__all__ = ["AttentionCall", "AttentionMap", "Watch", "watch_attention"]


@contextmanager
def watch_attention(
    model: nn.Module, see: Callable[[AttentionCall], None], *, names: AttentionMap | None = None
) -> Iterator[Watch]:
    """Calls `see` with the queries and keys of every attention the model computes in the block.

        with watch_attention(model, see) as watch:
            model(tokens)

    Everything is undone at the end, also after an error. Rows hidden altogether (the left padding
    of a batch) see no key, whatever the implementation makes of them. What gradient checkpointing
    computes a second time is not seen again.

    Args:
        model: any module; not compiled, or nothing could be seen.
        see: told of each `AttentionCall` as it happens, without gradients; it may call
            `call.statistics()`.
        names: where queries and keys are made, for a model that does not tell.

    Raises:
        ValueError: the model is of no kind that can be watched, or nothing was seen by the end.
    """
    if any(_is_compiled(module) for module in model.modules()):
        raise JomaError(
            "model must not be compiled to be watched: run one that is not now and then"
        )
    watch = Watch(see)
    passes = Passes(model, watch)
    with ExitStack() as stack:
        stack.enter_context(passes.followed())
        if names is not None:
            stack.enter_context(_watch_named.watching(model, names, passes))
        else:
            kinds = [kind for kind in (_watch_hf, _watch_torch) if kind.is_watchable(model)]
            if not kinds:
                raise JomaError(
                    f"model must be a Hugging Face model or hold nn.MultiheadAttention to be "
                    f"watched, got {type(model).__name__}: {HOW}"
                )
            for kind in kinds:
                stack.enter_context(kind.watching(model, passes))
        yield watch
    if not watch.calls:
        raise JomaError(
            f"no attention of {type(model).__name__} was seen: either it did not run, or it "
            f"computes attention in a way of its own: {HOW}"
        )


def _is_compiled(module: nn.Module) -> bool:
    call = getattr(module, "_compiled_call_impl", None)
    in_place = call is not None and not getattr(call, "is_uncompiled", False)
    return in_place or hasattr(module, "_orig_mod")
