"""Deja Vu: leave out the neurons and heads that a small network predicts not to matter.

For each token and layer a predictor of low rank says, from a hidden state of before, which neurons
of the MLP and which attention heads matter; the others are not computed (Liu et al., "Deja Vu:
Contextual Sparsity for Efficient LLMs at Inference Time", 2023).

- `fit` trains predictors from a model's own activations, `FitSettings` says how;
- `sparse` runs a model with them, or with a control: oracle, magnitude, static, random;
- `layer_quality` and `perplexity_cost` say what that costs on other text;
- `Predictors.save` and `load_predictors` keep them in a safetensors file.
"""

from joma.inference.sparsify._apply import (
    SELECTIONS,
    SparseRun,
    check_predictors,
    kept_of,
    largest,
    rows_times,
    sparse,
    times_rows,
)
from joma.inference.sparsify._fit import RANK_RATIO, FitSettings, fit, fit_predictor
from joma.inference.sparsify._layers import SparseLayer, sparse_layers
from joma.inference.sparsify._predictors import (
    Predictor,
    Predictors,
    SparsityFacts,
    load_predictors,
    model_fingerprint,
    rank_of,
)
from joma.inference.sparsify._quality import (
    TOP,
    LayerQuality,
    PerplexityCost,
    layer_quality,
    perplexity_cost,
)

__all__ = [
    "RANK_RATIO",
    "SELECTIONS",
    "TOP",
    "FitSettings",
    "LayerQuality",
    "PerplexityCost",
    "Predictor",
    "Predictors",
    "SparseLayer",
    "SparseRun",
    "SparsityFacts",
    "check_predictors",
    "fit",
    "fit_predictor",
    "kept_of",
    "largest",
    "layer_quality",
    "load_predictors",
    "model_fingerprint",
    "perplexity_cost",
    "rank_of",
    "rows_times",
    "sparse",
    "sparse_layers",
    "times_rows",
]
