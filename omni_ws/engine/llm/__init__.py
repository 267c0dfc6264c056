"""Language models (LLM): engines for ``Task.CHAT`` only, from text, and pictures, to text."""
