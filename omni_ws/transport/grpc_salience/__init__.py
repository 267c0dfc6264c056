"""The gRPC service salience.v1, which offers token sessions (protocol/salience.proto)."""
