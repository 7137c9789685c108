"""Nonlinear activation with attention: Eqn 6, and how entropy and rank drop and bounce back."""

from joma.experiments.claims.claim import Claim
from joma.experiments.claims.nonlinear import entropy, eqn6, rank

CLAIMS: tuple[Claim, ...] = (*eqn6.CLAIMS, *entropy.CLAIMS, *rank.CLAIMS)
