"""Observers of sessions and requests: metrics, logs, traces and profiles. Begin with ``observer``."""
