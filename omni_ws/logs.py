"""Log lines: text for people, or one JSON object per line for machines."""

from __future__ import annotations

import logging
import re
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from omni_ws.config.model import LogFormat, LogLevel

#: Control characters, which could forge a line or control the terminal.
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_PLAIN: Final = re.compile(r"[^\s\"=]+")

#: The lowest level that libraries may log, by the names of their loggers.
QUIETED_LOGGERS: Final[dict[str, int]] = {
    # Lines about single connections are noise for an operator; debug lines contain all headers and frames, even keys.
    "websockets": logging.ERROR,
    # A line for each request to an upstream, health checks included.
    "httpx": logging.WARNING,
    # They log URLs of MCP servers, what is sent to them and, as errors, tracebacks with both.
    "mcp": logging.CRITICAL,
    "client": logging.CRITICAL,  # the name of the logger of mcp.client.session
    "httpx2": logging.CRITICAL,
    "httpcore2": logging.CRITICAL,
    # A malformed form is reported to its client.
    "python_multipart": logging.ERROR,
}


class JsonFormatter(logging.Formatter):
    """Formats a record as a JSON object. ``time`` is UTC in ISO 8601; structured facts are fields of the object."""

    def __init__(self, *, worker: str | None = None) -> None:
        super().__init__()
        self._worker = {} if worker is None else {"worker": worker}

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            **self._worker,
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields |= {name: fact for name, fact in _facts(record).items() if name not in fields}
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        try:
            return msgspec.json.encode(fields, enc_hook=str).decode()
        except UnicodeEncodeError:  # a lone surrogate, as in the name of a file
            fields = {name: _whole(value) if isinstance(value, str) else value for name, value in fields.items()}
            return msgspec.json.encode(fields, enc_hook=str).decode()


class TextFormatter(logging.Formatter):
    """Formats a record as one line, with its facts appended as ``name=value``. Only a traceback adds lines."""

    def __init__(self, *, worker: str | None = None) -> None:
        name = "" if worker is None else f"{worker} "
        super().__init__(f"%(asctime)s %(levelname)-7s {name}%(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # name of logging's method
        facts = "".join(f" {name}={_word(value)}" for name, value in _facts(record).items())
        return _CONTROL.sub(_escaped, super().formatMessage(record)) + facts


def _facts(record: logging.LogRecord) -> dict[str, Any]:
    facts: dict[str, Any] = getattr(record, "facts", {})
    return facts


def _word(value: object) -> str:
    text = str(value)
    if _PLAIN.fullmatch(text) and not _CONTROL.search(text):
        return text
    return _CONTROL.sub(_escaped, msgspec.json.encode(_whole(text)).decode())


def _whole(text: str) -> str:
    """Return the text with each lone surrogate, which cannot be encoded, replaced by its name."""
    return text.encode("utf-8", "backslashreplace").decode()


def _escaped(found: re.Match[str]) -> str:
    return {"\n": r"\n", "\r": r"\r", "\t": r"\t"}.get(found[0], f"\\u{ord(found[0]):04x}")


def configure_logging(log_format: LogFormat, level: LogLevel, worker: str | None = None) -> None:
    """Send the logs of this process to standard error; the lines of a ``worker`` have its name."""
    handler = logging.StreamHandler()
    form = JsonFormatter if log_format == "json" else TextFormatter
    handler.setFormatter(form(worker=worker))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name, quietest in QUIETED_LOGGERS.items():
        logging.getLogger(name).setLevel(quietest)
