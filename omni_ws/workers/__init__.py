"""Several worker processes behind one port, and the supervisor that starts them and gives them connections."""
