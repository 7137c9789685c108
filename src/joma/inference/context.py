"""`cache`: let a model read and generate through a cache of a policy."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn

from joma.errors import JomaError
from joma.inference.policy import Policy

if TYPE_CHECKING:
    from joma.inference._cache import EvictingCache


@contextmanager
def cache(model: nn.Module, policy: Policy | Sequence[Policy]) -> "Iterator[EvictingCache]":
    """Let a model read and generate through a cache of a policy.

        with joma.inference.cache(model, HeavyHitter(64, 64)) as kv:
            model.generate(**inputs, past_key_values=kv)

    What is dropped is freed. Rows of a batch may be padded on the left, and each is kept as if it
    were alone. Inside the block, pass the cache with every call of the model; to begin another text
    call `kv.reset()`. At the end of the block, also after an error, the model is as it was.

    Args:
        model: A decoder of Hugging Face's transformers, in evaluation mode.
        policy: What to keep, for all layers or one for each.

    Raises:
        JomaError: A cache cannot serve this model, or not with this policy.
    """
    try:
        from joma.inference._cache import installed
    except ImportError as missing:
        raise JomaError("caches need transformers: pip install 'joma[hf]'") from missing
    with installed(model, policy) as kv:
        yield kv
