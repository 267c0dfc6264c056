"""How large the package is, how far a message walks in it, and the steps of five ways."""
