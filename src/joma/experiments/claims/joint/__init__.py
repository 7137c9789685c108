"""Joint dynamics of MLP and attention: Eqn 2, Theorem 1 and its laws."""

from joma.experiments.claims.joint import descent, dynamics, laws, softmax

CLAIMS = (*dynamics.CLAIMS, *laws.CLAIMS, *softmax.CLAIMS, *descent.CLAIMS)
