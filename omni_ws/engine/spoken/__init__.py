"""Spoken text: what a voice reads of what a model writes."""
