"""Where the time of requests goes: events that a server writes, and reports made of them."""
