"""The CDAG note: backpropagated gradients, Theorem 1 and its recursion, Eqns 2 and 3."""

from joma.experiments.claims.cdag import recursion, theorem1, training

CLAIMS = (*theorem1.CLAIMS, *recursion.CLAIMS, *training.CLAIMS)
