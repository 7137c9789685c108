"""Find the weights, attentions, MLPs and blocks of a transformer that no map is known of.

Names and shapes say what a matrix is; one forward pass, where one is given, decides what they leave
open. `find_weights` reads a model, `find_stored_weights` the names and shapes in files.
"""

from joma.models.discovery._dummy import dummy_forward
from joma.models.discovery._finder import Finder, Tracing, find_weights
from joma.models.discovery._projections import reader_path
from joma.models.discovery._stored import find_stored_weights, tree_of

__all__ = [
    "Finder",
    "Tracing",
    "dummy_forward",
    "find_stored_weights",
    "find_weights",
    "reader_path",
    "tree_of",
]
