"""Token sessions: lists of tokens that a client extends and lets the engine continue, served over gRPC."""
