"""Codecs, which convert bytes on the wire to values and back, for every interface of the server. No I/O."""
