"""Several worker processes that share one port, and the supervisor that starts them and gives them connections."""
