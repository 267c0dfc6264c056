"""Engines: what turns input into output. Third-party models are imported lazily, inside their own folder only."""
