"""Plays recorded sessions to a server again, and compares the answers."""
