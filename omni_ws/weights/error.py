"""The exception for weights that cannot be had."""

from __future__ import annotations


class WeightsError(Exception):
    """No source has the weights, or what it has are other bytes. Never crosses the wire; its text is for people."""
