"""Data to learn from, made where it is used: one batch for all members of an ensemble at once.

`LatentHierarchy` is the deterministic hierarchy of JoMA's Table 1, `HBLT` the binary latent trees
of its theory. Both draw a `Batch` with `sample(batch, step)` from `joma.random`, so that a batch is
a function of the member's seed and the step alone, on any device, and can be captured in a CUDA
graph.

Text comes from a `Corpus`, by name, from a folder or from the hub (`corpus`); a `TextTokenizer`
makes tokens of it (`BasicEnglish`, `ByteBPE`, `BYTES`, `HuggingFace`); `encoded` does so once and
keeps them in the `cache_folder`; `windows` and `streams` cut them into what a model is shown.
`read_text` is the text alone. Here may live whatever makes or reads data; what a model is, how it
is trained and what is measured of it live elsewhere.
"""

from joma.data.corpora import Corpus, cache_folder, corpus
from joma.data.encoded import Encoded, encoded
from joma.data.hierarchies import HBLT, Batch, Joined, LatentHierarchy
from joma.data.text import read_text, streams, windows
from joma.data.tokenizing import (
    BYTES,
    BasicEnglish,
    ByteBPE,
    HuggingFace,
    TextTokenizer,
    basic_english,
)

__all__ = [
    "BYTES",
    "HBLT",
    "BasicEnglish",
    "Batch",
    "ByteBPE",
    "Corpus",
    "Encoded",
    "HuggingFace",
    "Joined",
    "LatentHierarchy",
    "TextTokenizer",
    "basic_english",
    "cache_folder",
    "corpus",
    "encoded",
    "read_text",
    "streams",
    "windows",
]
