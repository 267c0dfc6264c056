"""One conversation: its input, the requests made of it, their answers, and its history. Begin with ``conversation``."""
