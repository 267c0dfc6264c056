"""Measurements, each against something to compare with, in one run: ``python -m benchmarks``."""
