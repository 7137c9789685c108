"""Adam for the 30 networks of Fig. 6 and 8 at full speed.

Most of their parameters are embeddings, of which a step reads a few rows. `LazyAdam` moves those
rows alone; the rest of the package needs none of it. Its counterpart for the networks themselves is
`joma.models.full_speed`.
"""

from joma.optim.full_speed.lazy_adam import LazyAdam, LazyRows

__all__ = ["LazyAdam", "LazyRows"]
