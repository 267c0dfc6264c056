"""Log lines, as text for people or as one JSON object a line for machines."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime

from omni_ws.config.model import LogFormat, LogLevel


class JsonFormatter(logging.Formatter):
    """``time`` is UTC in ISO 8601."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


def configure_logging(log_format: LogFormat, level: LogLevel) -> None:
    """Send the logs of this process to standard error."""
    handler = logging.StreamHandler()
    if log_format is LogFormat.JSON:
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    logging.basicConfig(level=level.value.upper(), handlers=[handler], force=True)
    # A line for each connection that opens or fails says nothing to an operator.
    logging.getLogger("websockets").setLevel(logging.ERROR)
