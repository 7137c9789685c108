"""Linear activation: Theorem 2, the talk's remarks on many nodes and rank, linear attention."""

from joma.experiments.claims.linear import linear_attention, many_nodes, theorem2

CLAIMS = (*theorem2.CLAIMS, *many_nodes.CLAIMS, *linear_attention.CLAIMS)
