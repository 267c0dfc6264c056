"""The default engine: recognition, rules and a voice from packages alone; no GPU, no model download."""
