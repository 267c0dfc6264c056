"""A load test of a running server: talkers that ask, and the times of their answers."""
