"""Recordings of sessions and HTTP requests, which a thread writes to files."""
