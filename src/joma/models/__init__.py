"""Models: the networks of the papers' experiments, in ensembles, and models people bring.

What may live here is the architecture of a model, how it is initialised or loaded, where its parts
are found, and whether a series of checkpoints can be believed; what it is trained on and how, and
what is measured of it, lives elsewhere.
"""

from joma.models._special_tokens import NO_SPECIAL_TOKENS, SpecialTokens
from joma.models.architectures import (
    ROLES,
    Architecture,
    architecture_of,
    load_map,
    module_at,
    number_of_layers,
    prefix_of,
    register,
    weights,
)
from joma.models.blank import enable_checkpointing
from joma.models.discovery import find_stored_weights, find_weights, reader_path
from joma.models.loading import Loaded, check_tokens, load, untrained
from joma.models.model_weights import (
    AttentionPart,
    BlockPart,
    Found,
    LowRank,
    Mlp,
    Part,
    Place,
    Rows,
    Weight,
)
from joma.models.networks import (
    Embedding,
    LanguageConfig,
    LanguageModel,
    LayerNorm,
    Linear,
    Transformer,
    TransformerConfig,
)
from joma.models.series import Integrity, Series, verify
from joma.models.tokenizers import Tokenizer, load_tokenizer
from joma.models.weight_files import StoredTensor, WeightFiles

__all__ = [
    "NO_SPECIAL_TOKENS",
    "ROLES",
    "Architecture",
    "AttentionPart",
    "BlockPart",
    "Embedding",
    "Found",
    "Integrity",
    "LanguageConfig",
    "LanguageModel",
    "LayerNorm",
    "Linear",
    "Loaded",
    "LowRank",
    "Mlp",
    "Part",
    "Place",
    "Rows",
    "Series",
    "SpecialTokens",
    "StoredTensor",
    "Tokenizer",
    "Transformer",
    "TransformerConfig",
    "Weight",
    "WeightFiles",
    "architecture_of",
    "check_tokens",
    "enable_checkpointing",
    "find_stored_weights",
    "find_weights",
    "load",
    "load_map",
    "load_tokenizer",
    "module_at",
    "number_of_layers",
    "prefix_of",
    "reader_path",
    "register",
    "untrained",
    "verify",
    "weights",
]
