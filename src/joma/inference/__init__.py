"""Sparse inference on Hugging Face models: what a key-value cache may drop, and what it costs.

- `cache`: a `with` block in which a model reads and generates through a cache of a policy.
- `Full`, `Window`, `Streaming`, `HeavyHitter`, `Random`: the policies, one file each. `Policy` is
  what to derive from for another one, and `Held` is what it decides on.
- `parse_policy`, `POLICIES`: policies by name.
- `cache_bytes`: what a cache will hold, before anything is allocated.
- `check_supported`: why a model cannot be served.
"""

from typing import TYPE_CHECKING, Any

from joma.inference.context import cache
from joma.inference.full import Full
from joma.inference.heavy_hitter import HeavyHitter
from joma.inference.policy import Held, Policy
from joma.inference.random import Random
from joma.inference.registry import POLICIES, parse_policy
from joma.inference.size import cache_bytes
from joma.inference.streaming import Streaming
from joma.inference.support import check_supported
from joma.inference.window import Window

if TYPE_CHECKING:
    from joma.inference._cache import EvictingCache

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
    if name == "EvictingCache":  # needs transformers
        from joma.inference._cache import EvictingCache

        return EvictingCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
