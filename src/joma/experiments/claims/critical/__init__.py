"""Lemma 4 and Theorem 3: where a node rests between clusters, and whether it returns there."""

from joma.experiments.claims.critical import families, phases, rest_points, stability

CLAIMS = (*rest_points.CLAIMS, *families.CLAIMS, *stability.CLAIMS, *phases.CLAIMS)
