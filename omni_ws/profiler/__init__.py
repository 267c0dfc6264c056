"""Request profiles: records events in the server, and reports on them."""
