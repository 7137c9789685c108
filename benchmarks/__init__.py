"""Timings and other long measurements; the last result of each is in RESULTS.md."""
