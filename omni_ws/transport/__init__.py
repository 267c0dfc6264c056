"""Floor 5: sockets. One port speaks HTTP/1.1 and WebSocket; what is said on it is decided elsewhere."""
