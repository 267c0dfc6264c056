"""HTTP/1.1 on one connection: heads, bodies, responses, and the upgrade to a WebSocket."""
