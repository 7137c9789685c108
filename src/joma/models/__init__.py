"""Models to experiment with: the transformer of the papers' experiments, many networks at once.

What may live here is the architecture of a model, how it is initialised and where its parts are
found; what it is trained on and how, and what is measured of it, lives elsewhere.
"""

from joma.models.layers import Embedding, LayerNorm, Linear
from joma.models.transformer import Transformer, TransformerConfig

__all__ = ["Embedding", "LayerNorm", "Linear", "Transformer", "TransformerConfig"]
