"""PackedEntries: a large JSON object that is searched in its own text, which takes a sixth of the memory of a dict."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from functools import lru_cache
from json.encoder import encode_basestring
from typing import Any, Final

_STRING: Final = rb'"[^"\\]*(?:\\.[^"\\]*)*"'
_ENTRY: Final = re.compile(_STRING + rb":(?:" + _STRING + rb"|\{(?:" + _STRING + rb'|[^"{}])*\})')
#: Entries that are searched from the first to the last.
_BLOCK: Final = 64
#: Values that are kept as objects: most words are said again soon.
_KEPT: Final = 2048


class PackedEntries:
    """What ``get`` finds is not to be changed. Not for several threads.

    ``text`` is UTF-8 without white space between the entries, and escapes only what JSON must. Each value is a string,
    or an object of strings and numbers. There is at least one entry.
    """

    def __init__(self, text: bytes) -> None:
        entries = sorted(_ENTRY.findall(text))
        #: Text does not contain the bytes of line ends, which JSON escapes.
        self._blocks = [
            b"\n".join([b"", *entries[start : start + _BLOCK], b""]) for start in range(0, len(entries), _BLOCK)
        ]
        self.get = lru_cache(_KEPT)(self._found)

    def _found(self, name: str) -> Any:
        """Return the value of the entry ``name``, None where there is none."""
        sought = b"\n" + encode_basestring(name).encode("utf-8", "surrogatepass") + b":"
        # No byte of UTF-8 is as large: this is behind every entry of that name.
        block = self._blocks[max(0, bisect_right(self._blocks, sought + b"\xff") - 1)]
        start = block.find(sought)
        if start < 0:
            return None
        start += len(sought)
        return json.loads(block[start : block.index(b"\n", start)])
