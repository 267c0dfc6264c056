"""The gRPC server of salience.v1, which offers token sessions (protocol/salience.proto)."""
