"""A load test of a running server: simulated users ask questions, and their answers are timed."""
