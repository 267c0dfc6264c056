"""``python -m benchmarks.mutants.inert``: whether the tests notice a name of the Realtime API that is only echoed.

For each name that *acts* by ``omni_ws/wire/realtime_parity.toml``, its test runs with the name inert: a field of the
client is taken out before the session sees it, and is shown all the same; an event of the client is acknowledged and
does nothing; an event of the server is not sent; a field of one has another value. A name whose test passes all the
same is printed as ``not noticed``, and the exit status is 1. Arguments are names, or beginnings of names::

    python -m benchmarks.mutants.inert session.audio response.tools
"""

from __future__ import annotations

import base64
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, Final, cast

import pytest
from _pytest.runner import runtestprotocol

from omni_ws.errors import OmniError
from omni_ws.transport.http import request as requests
from omni_ws.transport.realtime import session as connections
from omni_ws.transport.realtime.effects import abilities_of
from omni_ws.transport.realtime.realtime import RealtimeDialect
from omni_ws.wire.realtime_events import items_in, read_item, verdicts
from omni_ws.wire.realtime_session import merged_session, read_response, response_config

ROOT: Final = Path(__file__).parents[2]
#: How long a test waits for what does not come, where the clock is not virtual.
PATIENCE_SEC: Final = 5.0
#: How long one may take in all: by a virtual clock it may wait for ever.
LIMIT_SEC: Final = 60
#: Names that have nothing behind them that could be inert, with the reason.
NOTHING_BEHIND: Final = {
    "client.type": "an event without it is none",
    "session.truncation.type": "there is no other type",
    "response.metadata": "to be shown is all that it does: `server.response.metadata`",
}
_CALLS: Final = ("function_call", "function_call_output")
#: What only the server sets, though it is among the fields of a session or an item.
SET_BY_SERVER: Final = (
    *(f"session.{name}" for name in ("id", "object", "expires_at")),
    *(f"item.{kind}.{name}" for kind in ("message", *_CALLS) for name in ("object", "status")),
)
#: What is not shown to anyone.
NEVER_SHOWN: Final = ("session.tools.authorization", "session.tools.headers")
#: The acknowledgement of an event that does nothing, by its type.
ACKNOWLEDGED: Final[Mapping[str, Callable[[Mapping[str, Any]], list[dict[str, Any]]]]] = {
    "input_audio_buffer.clear": lambda event: [{"type": "input_audio_buffer.cleared"}],
    "input_audio_buffer.commit": lambda event: [
        {"type": "input_audio_buffer.committed", "item_id": "item_inert", "previous_item_id": None}
    ],
    "output_audio_buffer.clear": lambda event: [{"type": "output_audio_buffer.cleared", "response_id": "resp_inert"}],
    "conversation.item.create": lambda event: [
        {"type": f"conversation.item.{step}", "item": {"id": "item_inert", **event["item"]}, "previous_item_id": None}
        for step in ("added", "done")
    ],
    "conversation.item.delete": lambda event: [
        {"type": "conversation.item.deleted", "item_id": event.get("item_id", "")}
    ],
    "conversation.item.truncate": lambda event: [
        {
            "type": "conversation.item.truncated",
            **{name: event.get(name, 0) for name in ("item_id", "content_index", "audio_end_ms")},
        }
    ],
}
#: For each value of an enumeration, another valid value of it.
OTHERS: Final[Mapping[Any, Any]] = {
    "completed": "incomplete",
    "in_progress": "completed",
    "cancelled": "completed",
    "failed": "completed",
    "incomplete": "completed",
    "user": "assistant",
    "assistant": "user",
    "system": "user",
}
#: The events in which an object is shown again, by what the table calls it.
_SHOWN_IN: Final = {
    "session": ("session.created", "session.updated"),
    "response": ("response.created", "response.done"),
    "item": ("conversation.item.added", "conversation.item.done", "conversation.item.retrieved"),
}
#: Items that only the server creates.
_OF_SERVER: Final = ("item.mcp_list_tools", "item.mcp_call", "item.mcp_approval_request")
#: Items that are not read by ``read_item``.
_READ_ELSEWHERE: Final = ("item_reference", "mcp_approval_response")


def other(value: Any) -> Any:
    """Return a value of the same kind that is another one."""
    match value:
        case bool():
            return not value
        case int() | float():
            return 1 - value if 0 < value < 1 else value + 977
        case bytes():
            return bytes(len(value)) if any(value) else b"\x01" * len(value)
        case str() if len(value) > 256:  # base64: silence
            return base64.b64encode(bytes(len(base64.b64decode(value)))).decode()
        case str():
            return OTHERS.get(value, f"inert_{value}")
        case list():
            return [other(one) for one in value] or ["inert"]
        case dict():
            return {name: one if name == "type" else other(one) for name, one in value.items()}
    return "inert"


def change(inside: Any, path: list[str], to: Callable[[Any], Any] | None) -> None:
    """Change what is at the end of ``path``, in lists too; without ``to`` it is taken out."""
    if isinstance(inside, list):
        for one in inside:
            change(one, path, to)
    elif isinstance(inside, dict) and path[0] in inside:
        if len(path) > 1:
            change(inside[path[0]], path[1:], to)
        elif to is None:
            del inside[path[0]]
        else:
            inside[path[0]] = to(inside[path[0]])


def give_back(inside: Any, sent: Any, path: list[str]) -> None:
    """Put what is at the end of ``path`` in ``sent`` into ``inside``, in lists too."""
    if isinstance(inside, list) and isinstance(sent, list):
        for one, other_one in zip(inside, sent, strict=False):
            give_back(one, other_one, path)
    elif isinstance(inside, dict) and isinstance(sent, dict) and path[0] in sent:
        if len(path) == 1:
            inside[path[0]] = sent[path[0]]
        else:
            inside[path[0]] = inside.get(path[0]) or {}
            give_back(inside[path[0]], sent[path[0]], path[1:])


def is_valid(dialect: RealtimeDialect, event: Mapping[str, Any]) -> bool:
    """Whether a session takes an event of a client."""
    configuration, able = dialect._conversation.configuration, abilities_of(dialect._factory)
    try:
        if event["type"].endswith("session.update"):
            wanted = dialect._config(merged_session(dialect._session, event["session"]))
            configuration._check_mcp(wanted["tools"])
            if configuration.mcp is not None and (new := configuration.mcp.change(wanted["tools"])) is not None:
                wanted["tools"] = new.tools
            configuration._resolve(configuration._merged(wanted))
        elif event["type"] == "response.create":
            response = read_response(event.get("response") or {})
            configuration.with_patch(response_config(response, able))
        for _, item in items_in(event):
            if item is not None and item.get("type") not in _READ_ELSEWHERE:
                read_item(item, "item_0")
    except (OmniError, LookupError, TypeError, AttributeError):
        return False
    return True


class Inert:
    """One name that is inert, in every session of this process; with ``name`` empty, all of them act."""

    def __init__(self) -> None:
        self.begin("")

    def begin(self, name: str) -> None:
        self.name = name
        self._section, _, self._rest = name.partition(".")
        #: Whether an event without the name, or with another value, is refused.
        self.is_refused = False
        #: Whether an event of the client is handled now.
        self.handling = False
        self._given: tuple[list[str], Any] = [], None
        #: The path of the name, and the object of the client that had it.
        self._sent: tuple[list[str], Any] = [], None
        #: The same by the id of the item or response that it has become.
        self._became: dict[str, tuple[list[str], Any]] = {}

    # Events of the client

    def received(self, dialect: RealtimeDialect, event: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return an event of the client without the name, or with another value if it is refused without."""
        if not (found := self._without(event)) or not is_valid(dialect, event):
            return event
        self.is_refused = not any(is_valid(dialect, one) for one in found)
        taken = next((one for one in found if is_valid(dialect, one)), found[0])
        self._sent = self._given
        return taken

    def _without(self, event: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the event without the name, and with another value; nothing if the name is not in it."""
        found = []
        for to in (None, other):
            copy = deepcopy(dict(event))
            if isinstance(given := (copy.get("response") or {}).get("input"), list):
                given[:] = [one for one in given if self.name != f"item.{one.get('type')}"]
            for path, inside in self._objects(copy):
                if to is None:
                    self._given = path, deepcopy(inside)
                change(inside, path, to)
            found.append(copy)
        return [one for one in found if one != event]

    def _objects(self, event: dict[str, Any]) -> Iterator[tuple[list[str], Any]]:
        """Yield the objects in an event of a client that may have the name, each with the path in it."""
        if self.name == "client.event_id":
            yield ["event_id"], event
        elif self._section == "client" and self._rest.startswith(kind := f"{event['type']}."):
            yield self._rest.removeprefix(kind).split("."), event
        elif self._section in ("session", "response") and self.name not in SET_BY_SERVER:
            yield self._rest.split("."), event.get(self._section)
        elif self._section == "item":
            for _, item in items_in(event):
                kind, _, rest = self._rest.partition(".")
                if rest and isinstance(item, dict) and item.get("type") == kind:
                    yield rest.split("."), item

    def session(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the session object of a client secret without the name."""
        found = self._without({"type": "session.update", "session": fields})
        return found[0]["session"] if found else fields

    def is_dropped(self, event: Mapping[str, Any]) -> bool:
        """Whether ``event`` is of the kind that is inert, so that the session does not get it."""
        if event["type"] == "conversation.item.create" and self.name == f"item.{event['item'].get('type')}":
            return True
        return self.name == f"client.{event['type']}"

    # Events of the server

    def sent(self, events: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield the events as the client gets them."""
        for event in events:
            kind, found = event["type"], event
            if self.name == f"server.{kind}":
                continue
            if self.name.startswith(_OF_SERVER):
                found = deepcopy(event)
                for item in (found.get("item"), *found.get("response", {}).get("output", ())):
                    self._change_item(item)
            elif self.name in SET_BY_SERVER or self._section == "server":
                found = deepcopy(event)
                if self._section == "item":
                    self._change_item(found.get("item"))
                elif self._section == "session":
                    change(found.get("session"), self._rest.split("."), other)
                elif self._rest in ("type", "event_id"):
                    found[self._rest] = "inert"
                elif self._rest.startswith(f"{kind}."):
                    change(found, self._rest.removeprefix(f"{kind}.").split("."), other)
                elif kind in _SHOWN_IN["response"]:
                    change(found["response"], self._rest.removeprefix("response.").split("."), other)
            elif kind in _SHOWN_IN.get(self._section, ()):
                found = self._shown(event)
            yield found

    def _change_item(self, item: Any) -> None:
        kind, _, rest = self._rest.partition(".")
        if isinstance(item, dict) and item["type"] == kind:
            change(item, [rest] if not rest else rest.split("."), other)
            if not rest:
                item |= other(item)

    def _shown(self, event: dict[str, Any]) -> dict[str, Any]:
        """Return the event with what the client sent under the name, if that is shown at all."""
        found = deepcopy(event)
        inside = found[self._section]
        if self.handling and self._sent[0]:
            self._became.setdefault(inside.get("id"), self._sent)
        path, sent = self._sent if self._section == "session" else self._became.get(inside["id"], ([], None))
        if path and self.name not in NEVER_SHOWN and (self._section != "response" or path[0] in inside):
            give_back(inside, sent, path)
        return found


INERT: Final = Inert()


def plant(put: Callable[[Any, str, Any], None] = setattr) -> None:
    """Put ``INERT`` between all sessions of this process and their clients."""

    def handled(handle: Any, self: Any, fields: Mapping[str, Any], now: float) -> None:
        if not INERT.is_dropped(fields):
            handle(self, fields, now)
        elif (acknowledged := ACKNOWLEDGED.get(fields["type"])) is not None:
            self._send(acknowledged(fields))

    def received(receive: Any, self: Any, fields: Mapping[str, Any], *, now: float) -> None:
        INERT.handling = True
        try:
            receive(self, INERT.received(self, fields), now=now)
        finally:
            INERT.handling = False

    def decoded(decode: Any, data: Any) -> Any:
        event = decode(data)
        return {**event, "event_id": "inert"} if INERT.name == "client.event_id" and "event_id" in event else event

    def secret(read_secret: Any, fields: Mapping[str, Any]) -> Any:
        return read_secret({**fields, "session": INERT.session(fields.get("session") or {})})

    def parameters(split_query: Any, raw_query: str) -> Any:
        return requests.Fields([one for one in split_query(raw_query).items() if f"query.{one[0]}" != INERT.name])

    def sent(send: Any, self: Any, events: Iterable[dict[str, Any]]) -> None:
        send(self, INERT.sent(events))

    for place, name, around in (
        (RealtimeDialect, "_handle", handled),
        (RealtimeDialect, "receive", received),
        (connections, "decode_event", decoded),
        (connections, "read_client_secret", secret),
        (requests, "_split_query", parameters),
        (connections.RealtimeConnection, "_send", sent),
    ):
        put(place, name, _around(around, getattr(place, name)))


def _around(function: Any, before: Any) -> Any:
    """Return ``function`` with ``before`` as its first argument; it may be a method."""
    return lambda *arguments, **named: function(before, *arguments, **named)


# The plugin of pytest.


class Plugin:
    """Runs each test as it is, and then once for each of its ``names``; ``outcomes`` has how it failed."""

    def __init__(self, names: Mapping[str, list[str]]) -> None:
        self._names = names
        self.outcomes: dict[str, str] = {}

    def pytest_configure(self) -> None:
        from support import patience

        vars(patience)["PATIENCE_SEC"] = PATIENCE_SEC
        plant()

    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        test = item.nodeid.partition("[")[0].removeprefix("tests/")
        assert not self._failure(item), f"{test} fails anyway"
        for name in self._names[test]:
            INERT.begin(name)
            outcome = self._failure(item)
            if outcome and INERT.is_refused:
                outcome += " (the session refuses other values, too)"
            INERT.begin("")
            if outcome and not self.outcomes.get(name):
                print(f"{name}: {outcome}", flush=True)
            self.outcomes[name] = self.outcomes.get(name) or outcome
        item.session._setupstate.teardown_exact(nextitem)
        return True

    @staticmethod
    def _failure(item: pytest.Item) -> str:
        """Run a test. Returns the line of it that failed, or "" if it passes."""
        item._initrequest()  # type: ignore[attr-defined]
        for report in runtestprotocol(item, nextitem=cast("pytest.Item", item.parent), log=False):
            if report.failed:
                return str(re.findall("^> +(.*)", report.longreprtext, re.M)[0])
        return ""


def main(beginnings: list[str]) -> int:
    """Run the tests; returns 1 if any name is not noticed."""
    tests: dict[str, list[str]] = defaultdict(list)
    for name, verdict in verdicts().items():
        if verdict.acts and name not in NOTHING_BEHIND and name.startswith(tuple(beginnings)):
            file, _, test = verdict.acts.partition("::")
            tests[f"{'' if '/' in file else 'transport/realtime/'}{file}::{test}"].append(name)
    plugin = Plugin(tests)
    options = ["-q", "-s", "-p", "no:cacheprovider", "-n", "0", "--no-header", "--no-summary"]
    options += ["--timeout", str(LIMIT_SEC), "-o", "timeout_func_only=true"]
    pytest.main([*options, *(str(ROOT / "tests" / test) for test in tests)], plugins=[plugin])
    missing = [name for names in tests.values() for name in names if not plugin.outcomes.get(name)]
    print(f"{len(plugin.outcomes) - len(missing)} names are noticed, not: {', '.join(missing) or 'none'}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or [""]))
