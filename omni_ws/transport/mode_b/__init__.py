"""Mode B: sessions over several HTTP requests, and the readers of their results."""
