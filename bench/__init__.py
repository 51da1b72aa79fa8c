"""Benchmarks: one script per claim."""
