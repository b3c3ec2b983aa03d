"""Exact, fast verification of speculative decoding."""

__version__ = "0.1.0"
