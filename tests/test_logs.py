"""Log formats: a record is one line, with distinguishable facts."""

from __future__ import annotations

import json
import logging
import sys

import pytest

from omni_ws.errors import EngineFailed, EngineOverloaded, InvalidValue, RateLimited, ShuttingDown
from omni_ws.service.observing.accounts import level_of, write_line
from omni_ws.service.process import (
    QUIETED_LOGGERS,
    JsonFormatter,
    TextFormatter,
    configure_logging,
)

logger = logging.getLogger("omni_ws.test")


def record(message: str, *arguments: object, facts: dict[str, object] | None = None) -> logging.LogRecord:
    made = logging.LogRecord("omni_ws.test", logging.INFO, __file__, 1, message, arguments, None)
    if facts is not None:
        made.facts = facts
    return made


def test_json_has_facts_beside_the_message_and_its_own_names_win() -> None:
    line = JsonFormatter().format(record("request %d", 7, facts={"status": 200, "level": "mine", "text": 'a "b"\n☃'}))
    assert "\n" not in line
    read = json.loads(line)
    assert (read["message"], read["level"], read["status"], read["text"]) == ("request 7", "info", 200, 'a "b"\n☃')
    assert set(read) == {"time", "level", "logger", "message", "status", "text"}


def test_json_holds_a_traceback_in_the_line() -> None:
    made = record("failed")
    try:
        raise ValueError("why")
    except ValueError:
        made.exc_info = sys.exc_info()
    line = JsonFormatter().format(made)
    assert "\n" not in line
    assert "ValueError: why" in json.loads(line)["traceback"]


def test_text_has_facts_behind_the_message_quoted_where_they_must() -> None:
    line = TextFormatter().format(record("request", facts={"status": 200, "said": "a b", "odd": 'x="1"\n'}))
    assert line.endswith('INFO    omni_ws.test: request status=200 said="a b" odd="x=\\"1\\"\\n"')


@pytest.mark.parametrize("forged", ["a\nb", "a\r\nb", "a\x1b[31mb", "a\x85b", "a\u2028b", "a\x00b"])
def test_a_message_cannot_look_like_two(forged: str) -> None:
    line = TextFormatter().format(record("of %s", forged, facts={"text": forged}))
    assert len(line.splitlines()) == 1
    assert "\x1b" not in line
    assert "\x00" not in line


def test_lines_go_to_standard_error_from_the_level_on(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("json", "info")
    write_line(logger, logging.DEBUG, "too small")
    logging.getLogger("httpx").info("HTTP Request: GET http://127.0.0.1:8000/health")
    write_line(logger, logging.INFO, "request", status=200, code=None)
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert (json.loads(line)["status"], "code" in json.loads(line)) == (200, False)


def test_what_is_whose_fault() -> None:
    levels = [
        level_of(error)
        for error in (InvalidValue("x"), RateLimited("x"), EngineOverloaded("x"), ShuttingDown("x"), EngineFailed("x"))
    ]
    assert levels == [logging.INFO, logging.INFO, logging.WARNING, logging.WARNING, logging.ERROR]


def test_the_logger_of_mcp_sessions_is_quieted() -> None:
    """It logs what MCP servers send, with tracebacks, under a name that is not below "mcp"."""
    mcp_session = pytest.importorskip("mcp.client.session")
    assert QUIETED_LOGGERS[mcp_session.logger.name] == logging.CRITICAL
