"""The 30 language models of Fig. 6 and 8 at full speed: the same networks by kernels for a GPU.

`FastLanguageModel` is `joma.models.LanguageModel` with a forward and backward pass of few kernels
in bfloat16, made for one head, short windows and large vocabularies. Where a network does not fit
them, and on a CPU, it computes with torch's operations. No other network of the package uses it.
"""

from joma.models.full_speed.language import FastLanguageModel, Fetch

__all__ = ["FastLanguageModel", "Fetch"]
