"""Routes: the HTTP API, from request bodies to sessions and from their answers to responses."""
