"""Weights of models: which files they are, and where the same bytes are found (``requirements/weights.lock``).

Synchronous, and slow where something has to be fetched: for worker threads and for commands.
"""
