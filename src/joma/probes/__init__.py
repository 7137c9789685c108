"""What can be measured of a model: a functional core and thin stateful classes.

A probe looks at what a model computed (activations, attention, weights) and returns numbers. A pure
function does the mathematics, batched over leading axes with the ensemble's first; where data come
in batches, an accumulator of the same name adds up the same mathematics. What may live here is
measuring; nothing here runs, trains or draws a model.

- `ncorr`, `NCorrAccumulator`: do hidden nodes learn the latents? With its controls `held_out` and
  `shuffled`, without which the number says little.
- `attention_entropy`, `attention_statistics`, `AttentionAccumulator`: on how many tokens attention
  rests, from queries and keys alone; `watch_attention` gets them from a model while it runs.
- `attention_by_height`, `AttentionByHeightAccumulator`: how far up the hierarchy attention reaches.
"""

from joma.probes.attention import (
    AttentionAccumulator,
    AttentionMeans,
    AttentionStatistics,
    attention_entropy,
    attention_statistics,
)
from joma.probes.attention_height import (
    AttentionByHeight,
    AttentionByHeightAccumulator,
    attention_by_height,
)
from joma.probes.controls import HeldOut, Shuffled, held_out, shuffled
from joma.probes.ncorr import NCorr, NCorrAccumulator, ncorr
from joma.probes.watching import AttentionCall, AttentionMap, Watch, watch_attention

__all__ = [
    "AttentionAccumulator",
    "AttentionByHeight",
    "AttentionByHeightAccumulator",
    "AttentionCall",
    "AttentionMap",
    "AttentionMeans",
    "AttentionStatistics",
    "HeldOut",
    "NCorr",
    "NCorrAccumulator",
    "Shuffled",
    "Watch",
    "attention_by_height",
    "attention_entropy",
    "attention_statistics",
    "held_out",
    "ncorr",
    "shuffled",
    "watch_attention",
]
