"""A trial of a model that the tests do not know: does a cache serve it, and what turns its keys?"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from joma.errors import JomaError
from joma.inference._cache import installed
from joma.inference._kind import LayerKind
from joma.inference._rotation import rotated
from joma.inference.full import Full
from joma.inference.support import text_config

_TOKENS, _STEPS = 8, 5
_CHUNKS = (4, 1, 3)
_tried: WeakKeyDictionary[nn.Module, list[tuple[bool, bool]]] = WeakKeyDictionary()
"""Whether the keys of each layer are turned, and whether by its frequencies.

The frequencies are not kept: they change when the model is moved or gets another type.
"""


def tried_kinds(model: nn.Module, kinds: Sequence[LayerKind]) -> list[LayerKind]:
    """Return what the layers of a model are, by reading a few tokens twice.

    A cache that keeps everything must give the logits of the plain model, and the same text read a
    few positions further on must give the same keys, turned by the rotary frequencies. A layer
    whose keys stay as they are has no positions, and gets no frequencies.

    Raises:
        JomaError: A cache cannot serve the model, or nothing is known about how it turns its keys.
    """
    if model in _tried:
        return [_noted(kind, *note) for kind, note in zip(kinds, _tried[model], strict=True)]
    name = text_config(model).model_type
    try:
        found = _trial(model, kinds, name)
    except JomaError:
        raise
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError) as failure:
        reason = str(failure).partition("\n")[0]
        raise JomaError(f"a trial of {name} with a cache failed: {reason}") from failure
    _tried[model] = [(it.is_turned, it.frequencies is not None) for it in found]
    return found


@torch.no_grad()
def _trial(model: Any, kinds: Sequence[LayerKind], name: str) -> list[LayerKind]:
    device = next(model.parameters()).device
    vocabulary = int(text_config(model).vocab_size)
    ids = torch.arange(1, _TOKENS + 1, device=device)[None] * 7 % vocabulary
    plain = model(ids, use_cache=False).logits
    with installed(model, Full(), kinds) as kv:
        parts = [model(some, past_key_values=kv).logits for some in ids.split(_CHUNKS, 1)]
        cached = torch.cat(parts, 1)
        if not _alike(cached, plain):
            raise JomaError(
                f"a cache that keeps everything changes what {name} computes: it cannot serve it"
            )
        if all(it.frequencies is None for it in kinds):
            return list(kinds)
        keys = _keys(model, kv, ids, 0)
        moved = _keys(model, kv, ids, _STEPS)
    return [
        _known(kind, *pair) for kind, pair in zip(kinds, zip(keys, moved, strict=True), strict=True)
    ]


def _keys(model: Any, kv: Any, ids: Tensor, first: int) -> list[Tensor]:
    kv.reset()
    place = torch.arange(first, first + ids.shape[1], device=ids.device)[None]
    model(ids, past_key_values=kv, position_ids=place)
    return [it.store.keys for it in kv.layers]


def _known(kind: LayerKind, keys: Tensor, moved: Tensor) -> LayerKind:
    if _alike(moved, keys):
        return _noted(kind, False, False)
    steps = torch.full((1, 1), _STEPS, device=keys.device)
    found = kind.frequencies
    return _noted(kind, True, found is not None and _alike(moved, rotated(keys, steps, found)))


def _noted(kind: LayerKind, is_turned: bool, by_frequencies: bool) -> LayerKind:
    frequencies = kind.frequencies if by_frequencies else None
    return replace(kind, frequencies=frequencies, is_turned=is_turned)


def _alike(x: Tensor, y: Tensor) -> bool:
    tolerance = 1e-3 if x.dtype in (torch.float32, torch.float64) else 5e-2
    return bool((x - y).abs().max() <= tolerance * y.abs().max())
