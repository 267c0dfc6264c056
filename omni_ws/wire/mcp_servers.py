"""MCP servers as clients name them: entries ``{"type": "mcp", …}`` of ``tools``, and the names of their tools."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Container, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from omni_ws.core.json_values import check_values
from omni_ws.errors import InvalidFrame, InvalidValue, UnsupportedParameter
from omni_ws.wire.session_config import converted

#: Servers of one session.
MAX_SERVERS: Final = 8
MAX_HEADERS: Final = 32
MAX_CREDENTIAL_CHARACTERS: Final = 8192
#: The longest name that models may call.
MAX_NAME_CHARACTERS: Final = 64
_TOOL_CHOICES: Final = 1024

_Name: TypeAlias = Annotated[str, Meta(max_length=256)]
_Names: TypeAlias = Annotated[list[_Name], Meta(max_length=_TOOL_CHOICES)]
_Credential: TypeAlias = Annotated[str, Meta(max_length=MAX_CREDENTIAL_CHARACTERS)]
_FOREIGN: Final = re.compile(r"[^a-zA-Z0-9_-]")
_HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}")
#: Header fields that the connection itself sets.
_OWN_HEADERS: Final = frozenset(
    {"host", "content-length", "transfer-encoding", "connection", "upgrade", "te", "trailer", "accept-encoding"}
    | {"content-type", "accept", "mcp-session-id", "mcp-protocol-version", "last-event-id", "proxy-authorization"}
)


class ToolFilter(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Some tools of a server: those that are named and, with ``read_only``, say that they only read, or do not."""

    tool_names: _Names | None = None
    read_only: bool | None = None

    def has(self, name: str, *, reads_only: bool) -> bool:
        """Return whether the filter matches a tool."""
        named = self.tool_names is None or name in self.tool_names
        return named and (self.read_only is None or self.read_only == reads_only)


class ApprovalFilter(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The tools whose calls are always to be approved, and those whose calls never are."""

    always: ToolFilter | None = None
    never: ToolFilter | None = None


class McpServer(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An entry ``{"type": "mcp"}`` of ``tools``. Its ``repr`` has no credentials.

    ``require_approval`` is "always" unless the client says otherwise.
    """

    type: Literal["mcp"]
    server_label: Annotated[str, Meta(pattern=r"^[a-zA-Z][a-zA-Z0-9_-]{0,63}$")]
    server_url: Annotated[str, Meta(max_length=2048)] | None = None
    authorization: _Credential | None = None
    headers: Annotated[dict[str, _Credential], Meta(max_length=MAX_HEADERS)] | None = None
    allowed_tools: _Names | ToolFilter | None = None
    require_approval: Literal["always", "never"] | ApprovalFilter | None = None
    server_description: Annotated[str, Meta(max_length=4096)] | None = None
    connector_id: Any = None
    tunnel_id: Any = None
    defer_loading: bool | None = None

    def __repr__(self) -> str:
        return f"McpServer({self.server_label!r})"

    @property
    def request_headers(self) -> dict[str, str]:
        """The header fields of the client for each HTTP request to the server, the credentials among them."""
        sent = dict(self.headers or {})
        if self.authorization is not None:
            sent["Authorization"] = f"Bearer {self.authorization}"
        return sent

    def allows(self, name: str, *, reads_only: bool) -> bool:
        """Return whether the model may call a tool."""
        allowed = self.allowed_tools
        if isinstance(allowed, ToolFilter):
            return allowed.has(name, reads_only=reads_only)
        return allowed is None or name in allowed

    def asks(self, name: str, *, reads_only: bool) -> bool:
        """Return whether calls of a tool have to be approved. A tool that both filters match has to be."""
        wanted = self.require_approval
        if isinstance(wanted, ApprovalFilter):
            if wanted.always is not None and wanted.always.has(name, reads_only=reads_only):
                return True
            return wanted.never is None or not wanted.never.has(name, reads_only=reads_only)
        return wanted != "never"


#: The fields of an entry that are never shown, recorded or stored.
CREDENTIALS: Final = ("authorization", "headers")

#: What is recorded in place of a message whose credentials cannot be told from the rest.
REPLACED: Final = b"null"
#: A key of JSON whose value may hold credentials, as it stands or in a form; any key with escapes may be one.
_CREDENTIAL_KEY: Final = re.compile(
    rb'(?:"|%22)(?:authorization|headers|server_url|[a-z_]*\\u00[0-9A-Za-z_\\]*)(?:"|%22)\s*(?::|%3[Aa]|$)'
)


def has_credential_key(data: bytes | bytearray) -> bool:
    """Return whether data has, or ends with, a key of JSON whose value may hold credentials of an MCP server."""
    return _CREDENTIAL_KEY.search(data) is not None


def is_mcp(tool: Any) -> bool:
    """Return whether an entry of ``tools`` names an MCP server."""
    return isinstance(tool, Mapping) and tool.get("type") == "mcp"


def without_credentials(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry as it may be shown and kept: without credentials, also those in the query of its URL."""
    shown = {name: value for name, value in tool.items() if name not in CREDENTIALS}
    if isinstance(url := shown.get("server_url"), str):
        shown["server_url"] = url.partition("?")[0].partition("#")[0]
    return shown


def scrubbed(message: bytes) -> bytes:
    """Return a message of JSON as it may be recorded: without the credentials of MCP servers.

    A message that has a key of credentials is encoded anew, without the values of keys that are repeated; if it is no
    JSON, it is replaced as a whole.
    """
    if not has_credential_key(message):
        return message
    try:
        check_values(message)
        content = msgspec.json.decode(message)
    except (InvalidFrame, msgspec.DecodeError, UnicodeError, RecursionError):
        return REPLACED
    waiting = [content]
    while waiting:
        inside = waiting.pop()
        if isinstance(inside, dict):
            if is_mcp(inside) or not inside.keys().isdisjoint(("server_label", "server_url")):
                kept = without_credentials(inside)
                inside.clear()
                inside.update(kept)
            waiting += inside.values()
        elif isinstance(inside, list):
            waiting += inside
    return msgspec.json.encode(content)


def read_servers(tools: Sequence[Any], *, known: Container[str]) -> list[McpServer]:
    """Return the MCP servers among ``tools``. An entry of a ``known`` label need not repeat its URL.

    Raises InvalidValue and UnsupportedParameter, naming the field, never its value.
    """
    found: dict[str, McpServer] = {}
    for index, tool in enumerate(tools):
        if not is_mcp(tool):
            continue
        place = f"tools[{index}]"
        _refuse_unsupported(tool, place)
        try:
            server = converted(tool, McpServer, place=place)
        except InvalidValue as error:  # whose text may quote a value
            path = error.param or place
            raise InvalidValue(f"{path} is not valid for an MCP server", param=path) from None
        label = server.server_label
        if label in found:
            raise InvalidValue(f"duplicate server_label {label!r}", param=f"{place}.server_label")
        if server.server_url is None and label not in known:
            raise InvalidValue("an MCP server needs a server_url", param=f"{place}.server_url")
        _check_headers(server, place)
        found[label] = server
        if len(found) > MAX_SERVERS:
            raise InvalidValue(f"at most {MAX_SERVERS} MCP servers per session", param="tools")
    return list(found.values())


def _refuse_unsupported(tool: Mapping[str, Any], place: str) -> None:
    if tool.get("server_url") is not None and tool.get("connector_id") is not None:
        raise InvalidValue("server_url and connector_id exclude each other", param=f"{place}.connector_id")
    for name in ("connector_id", "tunnel_id"):
        if tool.get(name) is not None:
            raise UnsupportedParameter(
                f"{name} is not supported on this server; name the MCP server by server_url", param=f"{place}.{name}"
            )
    if tool.get("allowed_callers") is not None:
        raise UnsupportedParameter("allowed_callers is not supported", param=f"{place}.allowed_callers")
    if tool.get("defer_loading"):
        raise UnsupportedParameter(
            "defer_loading is not supported: the tools of all servers are offered", param=f"{place}.defer_loading"
        )


def _check_headers(server: McpServer, place: str) -> None:
    for name, value in server.request_headers.items():
        field = "authorization" if server.authorization is not None and name == "Authorization" else "headers"
        printable = value.isascii() and value.isprintable()
        if not _HEADER_NAME.fullmatch(name) or not printable or name.lower() in _OWN_HEADERS:
            raise InvalidValue("a header field has an invalid name or value", param=f"{place}.{field}")
    given = [name.lower() for name in server.headers or ()]
    if server.authorization is not None and "authorization" in given:
        message = "authorization and headers.Authorization exclude each other"
        raise InvalidValue(message, param=f"{place}.authorization")
    if len(set(given)) < len(given):
        raise InvalidValue("a header field is given twice", param=f"{place}.headers")


def offered_name(label: str, tool: str, taken: Container[str]) -> str:
    """Return the name under which a model is offered a tool of a server: one that is not ``taken``."""
    plain = name = _FOREIGN.sub("_", f"{label}__{tool}")
    tries = 0
    while len(name) > MAX_NAME_CHARACTERS or name in taken or (not tries and plain != f"{label}__{tool}"):
        digest = hashlib.sha256(f"{label}\0{tool}\0{tries}".encode()).hexdigest()[:8]
        name = f"{plain[: MAX_NAME_CHARACTERS - 9]}_{digest}"
        tries += 1
    return name
