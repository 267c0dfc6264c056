"""The routes of an application."""

from __future__ import annotations

from omni_ws.server import App


def routes_of(app: App) -> dict[str, set[str]]:
    """The methods of each route, by its template."""
    return {route.template: set(route.methods) for route in app._router._ordered}
