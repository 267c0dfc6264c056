"""Recordings of sessions and exchanges, written to files by a thread of their own. Begin with ``recorder``."""
