"""Real-time speech server, WebSocket-first, on one port.

``launch_server`` runs a server until it is stopped; ``create_app`` creates one to embed in a program.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omni_ws.server import create_app, launch_server

__version__ = "0.1.0"
__all__ = ["__version__", "create_app", "launch_server"]


def __getattr__(name: str) -> object:
    # Imported on demand: the client library needs no server.
    if name in ("create_app", "launch_server"):
        from omni_ws import server

        return getattr(server, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
