"""Telephone calls, over the WebSocket media stream of a telephony gateway."""
