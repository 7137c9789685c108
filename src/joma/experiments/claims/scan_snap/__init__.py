"""Scan&Snap: common and distinct tokens, Theorem 3 (who gains) and Theorem 4 (how B grows)."""

from joma.experiments.claims.scan_snap import gain, growth, rates, sequences, tokens

CLAIMS = (*tokens.CLAIMS, *gain.CLAIMS, *growth.CLAIMS, *rates.CLAIMS, *sequences.CLAIMS)
