"""HTTP/1.1: connections, exchanges, routing, and the upgrade of a connection to WebSocket."""
