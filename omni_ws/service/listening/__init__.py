"""Turn detection: which speech of an open microphone is a request."""
