"""omni_ws: a WebSocket-first, real-time speech server on one port."""

__version__ = "0.1.0"
