"""Joint dynamics of MLP and attention: Eqn 2, Theorem 1 and its laws."""
