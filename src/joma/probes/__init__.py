"""What can be measured of a model: a functional core and thin stateful classes.

A probe takes what a model computed (activations, attention, weights) and returns numbers. A pure
function does the mathematics, batched over leading axes with the ensemble's first; where data come
in batches, an accumulator of the same name adds up the same mathematics. What may live here is
measuring, and reading a text with a model in order to measure it; nothing here trains or draws.

- `probe`, `probe_weights`: a model read over a text, or its weights: all measurements in a list.
- `attention_entropy`, `attention_statistics`, `AttentionAccumulator`: on how many tokens attention
  rests, from queries and keys alone; `watch_attention` gets them from a model while it runs, and
  `tap_attention` can replace what attention computes.
- `stable_rank` and the rest of `joma.probes.spectrum`: spectra of weights, with error bounds.
- `embedding_overlap`, `activation_statistics`, `top_contexts`, `gradient_rank`: embeddings, MLP
  nodes and gradients.
- `ncorr`: do hidden nodes learn the latents? With its controls `held_out` and
  `shuffled`, without which the number says little, and `planted` for the power of the first.
- `attention_by_height`: how far up the hierarchy attention reaches.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from joma.probes.activations import (
        ActivationStatistics,
        ActivationStatisticsAccumulator,
        activation_statistics,
    )
    from joma.probes.attention import (
        AttentionAccumulator,
        AttentionMeans,
        AttentionStatistics,
        attention_entropy,
        attention_statistics,
    )
    from joma.probes.attention_height import (
        AttentionByHeight,
        attention_by_height,
    )
    from joma.probes.contexts import TopContexts, TopContextsAccumulator, top_contexts
    from joma.probes.controls import HeldOut, Shuffled, held_out, planted, shuffled
    from joma.probes.correlation import NCorr, ncorr
    from joma.probes.embedding import (
        EmbeddingOverlap,
        EmbeddingOverlapAccumulator,
        embedding_overlap,
    )
    from joma.probes.gradient import GradientRank, gradient_rank
    from joma.probes.session import Measurement, probe, probe_weights
    from joma.probes.spectrum import (
        StableRank,
        effective_rank,
        energy,
        singular_values,
        stable_rank,
        stable_ranks,
    )
    from joma.probes.tap import (
        AttentionCall,
        AttentionMap,
        Tap,
        tap_attention,
        watch_attention,
    )

__all__ = [
    "ActivationStatistics",
    "ActivationStatisticsAccumulator",
    "AttentionAccumulator",
    "AttentionByHeight",
    "AttentionCall",
    "AttentionMap",
    "AttentionMeans",
    "AttentionStatistics",
    "EmbeddingOverlap",
    "EmbeddingOverlapAccumulator",
    "GradientRank",
    "HeldOut",
    "Measurement",
    "NCorr",
    "Shuffled",
    "StableRank",
    "Tap",
    "TopContexts",
    "TopContextsAccumulator",
    "activation_statistics",
    "attention_by_height",
    "attention_entropy",
    "attention_statistics",
    "effective_rank",
    "embedding_overlap",
    "energy",
    "gradient_rank",
    "held_out",
    "ncorr",
    "planted",
    "probe",
    "probe_weights",
    "shuffled",
    "singular_values",
    "stable_rank",
    "stable_ranks",
    "tap_attention",
    "top_contexts",
    "watch_attention",
]

_MODULES = (
    "activations",
    "attention",
    "attention_height",
    "contexts",
    "controls",
    "correlation",
    "embedding",
    "gradient",
    "session",
    "spectrum",
    "tap",
)
"""Where the names above are; loaded at first use, since `joma.probes.metrics` needs no torch."""


def __getattr__(name: str) -> Any:
    if name in __all__:
        for module in _MODULES:
            found = getattr(importlib.import_module(f"joma.probes.{module}"), name, None)
            if found is not None:
                return found
    raise AttributeError(f"module 'joma.probes' has no attribute {name!r}")
