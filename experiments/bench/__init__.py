"""Benchmarks, one module each: ``python -m experiments bench NAME``."""
