"""How many values a JSON document has, counted before anything is built of it.

A parser makes an object of every value. Two bytes of text may become a hundred of memory, and while it works, nothing
else does: it holds the interpreter's lock, whichever thread it is in.
"""

from __future__ import annotations

from typing import Final

from omni_ws.errors import InvalidFrame

#: The most values of a message or a line, which is parsed on the event loop; and of a body, which is not.
MAX_MESSAGE_VALUES: Final = 50_000
MAX_BODY_VALUES: Final = 1_000_000
#: As how many values an array or an object counts.
_CONTAINER: Final = 4
#: Text that is looked through at once, in bytes.
_BLOCK: Final = 1 << 20
_QUOTE, _COMMA, _ARRAY, _OBJECT = b'",[{'


def check_values(data: bytes | bytearray | memoryview | str, most: int = MAX_MESSAGE_VALUES) -> None:
    """Raise InvalidFrame where a document has more than ``most`` values. Errors are left to the parser.

    Linear in the length of the text. What is in strings does not count.
    """
    if _CONTAINER * len(data) < most:
        return
    text = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else bytes(data)
    if text.count(b",") + _CONTAINER * (text.count(b"[") + text.count(b"{")) < most:
        return
    import numpy as np  # for the few documents that get here: clients import this module

    text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    values, in_string = 1, False
    for start in range(0, len(text), _BLOCK):
        codes = np.frombuffer(text, np.uint8, min(_BLOCK, len(text) - start), start)
        # Odd where the quotes so far have opened a string.
        quotes = np.bitwise_xor.accumulate(codes == _QUOTE)
        outside = codes[quotes == in_string]
        in_string ^= bool(quotes[-1])
        values += int(np.count_nonzero(outside == _COMMA))
        values += _CONTAINER * int(np.count_nonzero((outside == _ARRAY) | (outside == _OBJECT)))
        if values > most:
            raise InvalidFrame(f"the JSON has more than {most} values")
