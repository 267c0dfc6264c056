"""The native WebSocket protocol: the handshake, the connection, and the attachment of its session; and TCP links."""
