"""Scan&Snap: common and distinct tokens, Theorem 3 (who gains) and Theorem 4 (how B grows)."""
