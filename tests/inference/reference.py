"""Caches written a second time, token by token and head by head, with lists instead of slots."""

import math
from collections.abc import Callable

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import DynamicCache

NAME = "joma_reference"
Keep = Callable[[list[dict], int], list[dict]]
"""Takes the tokens a head holds and how many were read, and returns those that stay."""


def keep_window(n: int) -> Keep:
    return lambda held, seen: [it for it in held if it["at"] >= seen - n]


def keep_streaming(window: int, sinks: int) -> Keep:
    return lambda held, seen: [it for it in held if it["at"] < sinks or it["at"] >= seen - window]


def keep_heavy(heavy: int, recent: int, score: str = "sum", sight: int = 10**9) -> Keep:
    def keep(held: list[dict], seen: int) -> list[dict]:
        held = [it for it in held if seen - it["at"] < sight]
        late = [it for it in held if it["at"] >= seen - recent]
        early = [it for it in held if it["at"] < seen - recent]

        def value(it):
            return it["mass"] / (seen - it["at"]) if score == "mean" else it["mass"]

        room = heavy + recent - len(late)
        return sorted(early, key=value, reverse=True)[:room] + late

    return keep


def logits(
    model,
    ids: torch.Tensor,
    keep: Keep,
    *,
    in_cache: bool = False,
    decay: float = 1.0,
) -> torch.Tensor:
    """Return the logits of one text read token by token, (T, V).

    Args:
        model: A model with one kind of rotary embedding, or none.
        ids: (1, T).
        keep: What each head keeps after each token.
        in_cache: Whether keys and queries are rotated for their places among what is held.
        decay: Factor of the attention received, per token.
    """
    states: dict[tuple[int, int], list[dict]] = {}
    found = [it.inv_freq for it in model.modules() if hasattr(it, "inv_freq")]
    frequencies = found[-1] if found else torch.empty(0)
    at = 0  # the token that is read

    def turn(x: torch.Tensor, steps: float) -> torch.Tensor:
        """Multiply pairs of components, as complex numbers, by a phase."""
        half = len(frequencies)
        pairs = torch.complex(x[:half], x[half : 2 * half])
        pairs = pairs * torch.exp(1j * steps * frequencies.double())
        return torch.cat((pairs.real, pairs.imag, x[2 * half :]))

    def attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
        window = kwargs.get("sliding_window")
        _, H, _, D = query.shape
        scaling = D**-0.5 if scaling is None else scaling
        group = H // key.shape[1]
        result = torch.zeros(1, 1, H, value.shape[-1], dtype=value.dtype)
        for kv in range(key.shape[1]):
            held = states.setdefault((module.layer_idx, kv), [])
            held.append({"at": at, "key": key[0, kv, -1], "value": value[0, kv, -1], "mass": 0.0})
            for it in held:
                it["mass"] *= decay
            seen = [it for it in held if window is None or at - it["at"] < window]
            for head in range(kv * group, (kv + 1) * group):
                q, keys = query[0, head, 0], [it["key"] for it in seen]
                if in_cache:
                    order = sorted(it["at"] for it in seen)
                    q = turn(q, order.index(at) - at)
                    keys = [turn(it["key"], order.index(it["at"]) - it["at"]) for it in seen]
                scores = torch.stack([q @ k for k in keys]) * scaling
                share = torch.exp(scores - scores.max())
                share = share / share.sum()
                for it, part in zip(seen, share, strict=True):
                    it["mass"] += part.item()
                    result[0, 0, head] += part * it["value"]
            states[module.layer_idx, kv] = keep(held, at + 1)
        return result, None

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, lambda **_: None)
    before = model.config._attn_implementation
    model.config._attn_implementation = NAME
    logits = []
    try:
        cache = DynamicCache()
        for at in range(ids.shape[1]):
            position = torch.tensor([[at]])
            with torch.no_grad():
                out = model(ids[:, at : at + 1], past_key_values=cache, position_ids=position)
            logits.append(out.logits[0, -1])
    finally:
        model.config._attn_implementation = before
    assert not math.isnan(float(logits[-1].sum()))
    return torch.stack(logits)
