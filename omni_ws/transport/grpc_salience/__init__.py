"""salience.v1: token sessions over gRPC (protocol/salience.proto)."""
