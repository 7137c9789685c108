"""Generation with a limited cache, and what the limit costs against the full cache.

`encode_prompt` makes tokens of a prompt, `reading_with` opens a cache, `generate_tokens` continues
the prompt and `TextStream` turns tokens into text as they come. `AskedCaches` are the caches that
the command line asks for, and `Comparison` measures quality, memory and latency of several of them
on the same tokens.
"""

from joma.analysis.generation._caches import AskedCaches, NamedCache
from joma.analysis.generation._comparison import Comparison, block_error, speed_interval
from joma.analysis.generation._decoding import (
    Reader,
    TextStream,
    check_generates,
    check_length,
    encode_prompt,
    generate_tokens,
    reading_with,
    stop_tokens,
)

__all__ = [
    "AskedCaches",
    "Comparison",
    "NamedCache",
    "Reader",
    "TextStream",
    "block_error",
    "check_generates",
    "check_length",
    "encode_prompt",
    "generate_tokens",
    "reading_with",
    "speed_interval",
    "stop_tokens",
]
