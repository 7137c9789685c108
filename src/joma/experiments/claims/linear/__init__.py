"""Linear activation: Theorem 2, the talk's remarks on many nodes and rank, linear attention."""
