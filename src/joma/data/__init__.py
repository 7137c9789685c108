"""Data to learn from, made where it is used: one batch for all members of an ensemble at once.

`LatentHierarchy` is the deterministic hierarchy of JoMA's Table 1, `HBLT` the binary latent trees
of its theory. Both draw a `Batch` with `sample(batch, step)` from `joma.random`, so that a batch is
a function of the member's seed and the step alone, on any device, and can be captured in a CUDA
graph. `read_text` and `windows` bring the text a model is measured on. Here may live whatever makes
or reads data; what a model is, how it is trained and what is measured of it live elsewhere.
"""

from joma.data._batch import Batch
from joma.data.hblt import HBLT
from joma.data.hierarchy import Joined, LatentHierarchy
from joma.data.text import read_text, windows

__all__ = ["HBLT", "Batch", "Joined", "LatentHierarchy", "read_text", "windows"]
