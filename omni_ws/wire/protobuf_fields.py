"""How many fields a protobuf message has, found without parsing what is in them."""

from __future__ import annotations


def has_more_fields(message: bytes, limit: int) -> bool:
    """Whether ``message`` has more than ``limit`` fields; those within messages that it holds do not count.

    A field of two bytes becomes an object of dozens when it is parsed. Where the message breaks off or is none, what
    comes before that is counted: a parser will not get further either.
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
                case 3 | 4:  # a group begins or ends; its fields are counted as they come
                    pass
                case 5:
                    position += 4
                case _:
                    return False
    except IndexError:
        return False
    return True


def _varint(message: bytes, position: int) -> tuple[int, int]:
    """The number at ``position``, and where the next thing begins. Raises IndexError where there is none."""
    value = 0
    for shift in range(0, 70, 7):
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise IndexError("a number of more than ten bytes")
