"""The store of sessions, from which another process can continue a session whose process has ended."""
