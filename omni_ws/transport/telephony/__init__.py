"""Telephone calls, over the media stream of a gateway or over Asterisk's AudioSocket."""
