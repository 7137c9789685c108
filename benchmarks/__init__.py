"""Timings and other long measurements; `python -m benchmarks.speed` reruns every claim of speed.

The last result of each claim is in RESULTS.md, and conditions are in MEASUREMENTS.md.
"""
