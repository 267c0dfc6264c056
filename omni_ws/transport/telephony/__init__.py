"""Telephone calls, over a gateway's media stream, or Asterisk's AudioSocket."""
