"""What takes long: timings of both sides in one run; the last results are in RESULTS.md."""
