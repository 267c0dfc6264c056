"""Request bodies of type ``multipart/form-data`` (RFC 7578), parsed as they arrive."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import unquote_to_bytes

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from omni_ws.errors import InvalidFrame, InvalidValue, PayloadTooLarge, UnsupportedFormat
from omni_ws.transport.http.exchange import HttpExchange

FORM_TYPE: Final = "multipart/form-data"
#: The part that is a file also where it has no file name.
FILE_FIELD: Final = b"file"
_EXTENDED_FILENAME: Final = re.compile(rb";\s*filename\*\s*=\s*[\w-]+'[\w-]*'([^;\s]*)", re.IGNORECASE)
#: Parts of one form.
MAX_PARTS: Final = 64
#: Size of a part that is not a file.
MAX_FIELD_BYTES: Final = 64 * 1024
#: Size of one header line of a part.
_MAX_HEADER_BYTES: Final = 4096


@dataclass(slots=True)
class FormPart:
    """One part of a form.

    ``filename`` is None where it is not a file, and "" for a file that has none; ``content_type`` is "" where it has
    none.
    """

    name: str
    filename: str | None
    content_type: str
    data: bytearray = field(default_factory=bytearray)


async def read_form(exchange: HttpExchange, limit: int) -> list[FormPart]:
    """Read a body of at most ``limit`` bytes, and return its parts in order.

    Raises UnsupportedFormat for another content type, InvalidFrame for a malformed form, InvalidValue for too many
    parts, PayloadTooLarge, and what ``HttpExchange.read`` and ``charge`` raise.
    """
    reader = FormReader(exchange.request.headers.get("content-type") or "")
    if (exchange.request.content_length or 0) > limit:
        raise PayloadTooLarge(f"the request body exceeds {limit} bytes")
    size = 0
    async for data in exchange.body():
        size += len(data)
        if size > limit:
            raise PayloadTooLarge(f"the request body exceeds {limit} bytes")
        exchange.charge(size)
        reader.feed(data)
    return reader.finish()


class FormReader:
    """Incremental parser of a form: python-multipart's, with limits on parts and fields.

    The result does not depend on how the body is cut into pieces. Time is linear in the size of the body, and memory
    is bounded by that size. Raises UnsupportedFormat for a content type that is not a form's.
    """

    def __init__(self, content_type: str) -> None:
        kind, parameters = parse_options_header(content_type)
        boundary = parameters.get(b"boundary")
        if kind.decode("latin-1").lower() != FORM_TYPE or not boundary:
            raise UnsupportedFormat(f"the body must be {FORM_TYPE} with a boundary", param="Content-Type")
        self._parts: list[FormPart] = []
        self._headers: dict[str, bytes] = {}
        self._name, self._value = b"", b""
        self._ended = False
        #: The delimiter that the body must begin with, and what has arrived of it; None once it is complete.
        self._delimiter = b"--" + boundary
        self._beginning: bytes | None = b""
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._on_part_begin,
                    "on_header_field": self._on_header_field,
                    "on_header_value": self._on_header_value,
                    "on_header_end": self._on_header_end,
                    "on_headers_finished": self._on_headers_finished,
                    "on_part_data": self._on_part_data,
                    "on_end": self._on_end,
                },
                max_header_size=_MAX_HEADER_BYTES,
            )
        except FormParserError as error:
            raise InvalidFrame(f"invalid boundary: {str(error)[:80]}") from None

    def feed(self, data: bytes) -> None:
        """Parse the next piece. Raises InvalidFrame, InvalidValue or PayloadTooLarge."""
        if self._beginning is not None:
            # The parser skips a preamble, and what it takes for one depends on how the body is cut.
            data = (self._beginning + data).lstrip(b"\r\n")
            if not data.startswith(self._delimiter[: len(data)]):
                raise InvalidFrame("the form must begin with its boundary")
            whole = len(data) >= len(self._delimiter)
            self._beginning = None if whole else data
            if not whole:
                return
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise InvalidFrame(f"invalid form: {str(error)[:80]}") from None

    def finish(self) -> list[FormPart]:
        """Return the parts, at the end of the body. Raises InvalidFrame where the closing delimiter is missing."""
        if not self._ended:
            raise InvalidFrame("the form ended before its last boundary")
        return self._parts

    def _on_part_begin(self) -> None:
        if len(self._parts) == MAX_PARTS:
            raise InvalidValue(f"at most {MAX_PARTS} parts per form")
        self._headers = {}

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _on_header_end(self) -> None:
        self._headers[self._name.decode("latin-1").lower()] = self._value
        self._name, self._value = b"", b""

    def _on_headers_finished(self) -> None:
        disposition = self._headers.get("content-disposition", b"")
        kind, options = parse_options_header(disposition)
        name, filename = options.get(b"name"), options.get(b"filename")
        if kind != b"form-data" or name is None:
            raise InvalidFrame("a part of the form has no name")
        if filename is None:
            filename = _extended_filename(disposition)
        if filename is None and name == FILE_FIELD:
            filename = b""
        self._parts.append(
            FormPart(
                name.decode("utf-8", "replace"),
                None if filename is None else filename.decode("utf-8", "replace"),
                self._headers.get("content-type", b"").decode("latin-1"),
            )
        )

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        part = self._parts[-1]
        part.data += data[start:end]
        if part.filename is None and len(part.data) > MAX_FIELD_BYTES:
            raise PayloadTooLarge(f"at most {MAX_FIELD_BYTES} bytes per form field")

    def _on_end(self) -> None:
        self._ended = True


def _extended_filename(disposition: bytes) -> bytes | None:
    """The file name in the form of RFC 5987, which the parser leaves out."""
    found = _EXTENDED_FILENAME.search(disposition)
    return None if found is None else unquote_to_bytes(found[1])
