"""Codecs: bytes of the wire to values and back, for every interface of the server. No I/O."""
