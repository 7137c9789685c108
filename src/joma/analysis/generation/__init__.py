"""Generation with a limited cache, and what the limit costs against the full cache.

`encode_prompt` makes tokens of a prompt, `generate_tokens` and `search_beams` continue it with any
cache, `TextStream` turns tokens into text as they come, `Comparison` measures quality, memory and
latency of several caches on the same tokens, and `parse_caches` reads what the command line takes.
"""

from joma.analysis.generation._budgets import (
    SWEPT,
    AskedCaches,
    NamedCache,
    auto_caches,
    check_caches,
    keys_of_budget,
    parse_caches,
    planned_caches,
    policy_of_budget,
)
from joma.analysis.generation._comparison import Comparison, block_error, speed_interval
from joma.analysis.generation._prompt import TextStream, check_length, encode_prompt, stop_tokens
from joma.analysis.generation._reader import Reader, check_generates, reading_with
from joma.analysis.generation._sampling import Sampling, generate_tokens, search_beams

__all__ = [
    "SWEPT",
    "AskedCaches",
    "Comparison",
    "NamedCache",
    "Reader",
    "Sampling",
    "TextStream",
    "auto_caches",
    "block_error",
    "check_caches",
    "check_generates",
    "check_length",
    "encode_prompt",
    "generate_tokens",
    "keys_of_budget",
    "parse_caches",
    "planned_caches",
    "policy_of_budget",
    "reading_with",
    "search_beams",
    "speed_interval",
    "stop_tokens",
]
