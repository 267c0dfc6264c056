"""Bytes to typed frames and back. Sans-I/O."""
