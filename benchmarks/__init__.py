"""Benchmarks: `python -m benchmarks` runs all of them."""
