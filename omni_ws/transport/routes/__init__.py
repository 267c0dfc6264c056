"""The routes of the HTTP API: they open sessions for request bodies, and turn answers into responses."""
