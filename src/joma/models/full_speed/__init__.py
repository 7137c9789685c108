"""Networks of experiments at full speed: the same numbers by kernels for a GPU.

`FastLanguageModel` is `joma.models.LanguageModel` for the 30 networks of Fig. 6 and 8, with a
forward and backward pass of few kernels, made for one head, short windows and large vocabularies.
`FastTransformer` is `joma.models.Transformer` for those of Table 1: few positions, wide layers.
Both need bfloat16; where a network does not fit the kernels, and on a CPU, they compute with
torch's operations. No other network of the package uses them.
"""

from joma.models.full_speed.language import FastLanguageModel, Fetch
from joma.models.full_speed.transformer import FastTransformer

__all__ = ["FastLanguageModel", "FastTransformer", "Fetch"]
