"""Replay: recorded sessions sent again, and their answers held against those of then."""
