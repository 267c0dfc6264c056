"""Counts the fields of a protobuf message before it is parsed: a defence against messages that explode in memory."""

from __future__ import annotations


def has_more_fields(message: bytes, limit: int) -> bool:
    """Return whether ``message`` has more than ``limit`` fields, not counting those of nested messages.

    A parser turns a field of two bytes into an object of dozens, so the fields are counted first. Counting stops at a
    truncated or malformed field, as a parser does.
    """
    position = 0
    try:
        for _ in range(limit + 1):
            if position >= len(message):
                return False
            tag, position = _varint(message, position)
            match tag & 7:
                case 0:
                    _, position = _varint(message, position)
                case 1:
                    position += 8
                case 2:
                    size, position = _varint(message, position)
                    position += size
                case 3 | 4:  # start or end of a group, whose fields count like the others
                    pass
                case 5:
                    position += 4
                case _:
                    return False
    except IndexError:
        return False
    return True


def _varint(message: bytes, position: int) -> tuple[int, int]:
    """Return the varint at ``position`` and the position after it. Raises IndexError if the message ends before."""
    value = 0
    for shift in range(0, 70, 7):
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise IndexError("a varint has more than ten bytes")
