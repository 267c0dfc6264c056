"""Recordings of sessions, written to files by a thread of their own."""
