"""One conversation: its input, its requests in order, their answers, and what it remembers."""
