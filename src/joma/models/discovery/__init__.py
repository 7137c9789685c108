"""Find the weights, attentions, MLPs and blocks of a transformer that no map is known of.

Names say what a matrix is, and shapes confirm it; what they do not say, a map does
(`joma.models.architectures`). `find_weights` reads a model, `find_stored_weights` the names and
shapes in files. What cannot be understood is left out and named in `Found.missing`.
"""

from joma.models.discovery._finder import find_stored_weights, find_weights
from joma.models.discovery._matrices import reader_path

__all__ = ["find_stored_weights", "find_weights", "reader_path"]
