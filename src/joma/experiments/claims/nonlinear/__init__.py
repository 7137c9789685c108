"""Nonlinear activation with attention: Eqn 6, and how entropy and rank drop and bounce back."""

from joma.experiments.claims.nonlinear import entropy, eqn6, rank

CLAIMS = (*eqn6.CLAIMS, *entropy.CLAIMS, *rank.CLAIMS)
