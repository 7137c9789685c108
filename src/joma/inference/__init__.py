"""Sparse inference on Hugging Face models: what a key-value cache may drop, and what it costs.

- `cache`: a `with` block in which a model reads and generates through a cache of a policy.
- `Full`, `Window`, `Streaming`, `HeavyHitter`, `Random`: the policies. `Policy` is what to derive
  from for another one, and `Held` is what it decides on.
- `parse_policy`, `POLICIES`: policies by name.
- `cache_bytes`: what a cache will hold, before anything is allocated.
- `check_supported`: why a model cannot be served.
"""

from typing import TYPE_CHECKING, Any

from joma.inference.policies import (
    POLICIES,
    Full,
    HeavyHitter,
    Held,
    Policy,
    Random,
    Streaming,
    Window,
    parse_policy,
)
from joma.inference.support import cache_bytes, check_supported

if TYPE_CHECKING:
    from joma.inference._cache import EvictingCache, cache

__all__ = [
    "POLICIES",
    "EvictingCache",
    "Full",
    "HeavyHitter",
    "Held",
    "Policy",
    "Random",
    "Streaming",
    "Window",
    "cache",
    "cache_bytes",
    "check_supported",
    "parse_policy",
]


def __getattr__(name: str) -> Any:
    if name in ("EvictingCache", "cache"):  # which need transformers
        from joma.inference import _cache

        return getattr(_cache, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
