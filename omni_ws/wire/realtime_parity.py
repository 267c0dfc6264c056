"""The verdicts on OpenAI's Realtime API: what becomes of every name in it here.

``realtime_parity.toml`` has the table; docs/realtime-parity.md is generated from it. A test compares it with the
types of the ``openai`` package.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import resources
from typing import Final

import msgspec
from msgspec import Struct

#: The section of names that are not OpenAI's. They are written whole.
EXTENSION: Final = "extension"
_BRACES: Final = re.compile(r"^(?P<begin>.*)\{(?P<ends>[^{}]+)\}$")


class ParityVerdict(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One row of the table. Exactly one of ``acts``, ``not_in_effect`` and ``refused`` is set.

    ``acts`` names the test that would fail if the value were only echoed. ``otherwise`` is the reason why it is not in
    effect where the engine lacks what it needs. ``not_in_effect`` and ``refused`` are reasons.
    """

    acts: str = ""
    otherwise: str = ""
    not_in_effect: str = ""
    refused: str = ""
    #: Whether the name is not OpenAI's.
    extension: bool = False

    @property
    def reason(self) -> str:
        """Why the value has no effect, or is refused; empty if it always acts."""
        return self.otherwise or self.not_in_effect or self.refused


@cache
def verdicts() -> dict[str, ParityVerdict]:
    """Return the verdicts by name, in the order of the table: ``session.audio.output.speed``.

    A verdict that is not ``acts`` is that of all names below it, too.
    """
    text = resources.files("omni_ws.wire").joinpath("realtime_parity.toml").read_text(encoding="utf-8")
    found: dict[str, ParityVerdict] = {}
    for section, rows in tomllib.loads(text).items():
        for key, row in rows.items():
            verdict = msgspec.convert({**row, "extension": section == EXTENSION}, ParityVerdict)
            for name in _names(section, key):
                if name in found:
                    raise ValueError(f"realtime_parity.toml: {name} has two verdicts")
                found[name] = verdict
    return found


def verdict_of(name: str) -> ParityVerdict | None:
    """Return the verdict on a name: its own, or that of the object that it is in; None if the name is not OpenAI's."""
    table = verdicts()
    if (own := table.get(name)) is not None:
        return own
    while "." in name:
        name = name.rpartition(".")[0]
        if (above := table.get(name)) is not None:
            return None if above.acts else above
    return None


@cache
def _with_fields() -> frozenset[str]:
    return frozenset(name.rpartition(".")[0] for name in verdicts())


def with_fields(name: str) -> bool:
    """Return whether the table has names of fields in the object, or the list of objects, ``name``."""
    return name in _with_fields()


def _names(section: str, key: str) -> Iterator[str]:
    """Yield the names of one row: those that ``begin.{one,two}`` stands for, or the key itself."""
    begin = "" if section == EXTENSION else f"{section}."
    if (braces := _BRACES.match(key)) is None:
        yield f"{begin}{key}"
        return
    for end in braces["ends"].split(","):
        yield f"{begin}{braces['begin']}{end}"


def parity_lines() -> Iterator[str]:
    """Yield the rows of docs/realtime-parity.md, a table for each section."""
    section = ""
    for name, verdict in verdicts().items():
        place, _, rest = (EXTENSION, "", name) if verdict.extension else name.partition(".")
        if place != section:
            section = place
            yield from ("", f"## {_TITLES[section]}", "", "| name | verdict | |", "|---|---|---|")
        yield f"| `{rest}` | {_words(verdict)} |"


_TITLES: Final = {
    "query": "The URL",
    "client": "Client events",
    "session": "The session: `session.update` and client secrets",
    "response": "The response: `response.create`",
    "item": "Items: `conversation.item.create`, and the `input` of a response",
    "server": "Server events, and the response object in them (`response.…`)",
    EXTENSION: "Extensions, which OpenAI does not have",
}


def _words(verdict: ParityVerdict) -> str:
    if verdict.acts:
        return f"acts | {f'otherwise not in effect: {verdict.otherwise}' if verdict.otherwise else ''}".rstrip()
    if verdict.not_in_effect:
        return f"not in effect | {verdict.not_in_effect}"
    return f"refused | {verdict.refused}"
