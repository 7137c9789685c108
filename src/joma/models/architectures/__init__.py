"""Where the embedding, queries, keys and the MLP live in the transformers people bring.

One `Architecture` per family is all there is to know: parameter names and module paths relative to
the base model, with "{layer}" where the number of the block stands. `architecture_of` finds the map
of a model, `weights` finds every weight it names among the names of a model or of a file, so that a
file need not be loaded to be measured, and `register` adds a map of one's own.
"""

from joma.models.architectures._apply import (
    found_by_map,
    module_at,
    module_path,
    number_of_layers,
    prefix_of,
    weights,
)
from joma.models.architectures._known import (
    UnknownArchitectureError,
    architecture_of,
    how_to_map,
    known_architecture,
    register,
    registered_for,
)
from joma.models.architectures._map import (
    LAYER,
    ROLES,
    Architecture,
    Config,
    config_entry,
    load_map,
)
from joma.models.parts import Part, Place, Rows, Weight

__all__ = [
    "LAYER",
    "ROLES",
    "Architecture",
    "Config",
    "Part",
    "Place",
    "Rows",
    "UnknownArchitectureError",
    "Weight",
    "architecture_of",
    "config_entry",
    "found_by_map",
    "how_to_map",
    "known_architecture",
    "load_map",
    "module_at",
    "module_path",
    "number_of_layers",
    "prefix_of",
    "register",
    "registered_for",
    "weights",
]
