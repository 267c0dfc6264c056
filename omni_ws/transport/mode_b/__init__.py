"""Mode B: sessions over several HTTP requests, and whoever reads their results."""
