"""Lemma 4 and Theorem 3: where a node rests between clusters, and whether it returns there."""
