"""Find the weights, attentions, MLPs and blocks of a transformer that no map is known of.

Names and shapes say what a matrix is; one forward pass, where one is given, decides what they leave
open. `find_weights` reads a model, `find_stored_weights` the names and shapes in files.
"""

from joma.models.discovery._projections import reader_path
from joma.models.discovery._stored import find_stored_weights, tree_of
from joma.models.discovery._tracing import Tracing, dummy_forward, find_weights

__all__ = [
    "Tracing",
    "dummy_forward",
    "find_stored_weights",
    "find_weights",
    "reader_path",
    "tree_of",
]
