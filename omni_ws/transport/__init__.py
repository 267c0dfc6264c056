"""Floor 5: transports. One port serves HTTP/1.1 and WebSocket; gRPC has one of its own. No policy is decided here."""
