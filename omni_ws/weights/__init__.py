"""Weights of models: the pinned files, and the sources of the same bytes (``requirements/weights.lock``).

The functions block, for long if something has to be fetched: for worker threads and for commands.
"""
