"""The native WebSocket protocol: one connection, and the session that speaks through it."""
