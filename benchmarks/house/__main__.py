"""``python -m benchmarks.house [--json | --walks]`` prints how large the package is, and how far a message walks in it.

The docstring of ``benchmarks.house.code`` says what counts, that of ``benchmarks.house.ways`` which ways are traced.
``--walks`` prints the steps of the five ways, each "file: function". ``--code`` runs no server. The spoken turn needs
the extras ``embedded``, ``whisper`` and a voice, and their weights.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from benchmarks.house.code import figures, modules_of, state_enums
from benchmarks.house.traces import Way, names_of, walk

ROOT: Final = Path(__file__).parents[2]
PACKAGE: Final = ROOT / "omni_ws"
#: The ways of which the figures tell.
COUNTED: Final = ("one chunk in", "one output out", "one spoken turn")


def code_figures() -> dict[str, float]:
    found = figures(PACKAGE)
    found["lines of docs/design.md"] = len((ROOT / "docs" / "design.md").read_text(encoding="utf-8").splitlines())
    return found


def way_figures(ways: Mapping[str, Way]) -> dict[str, float]:
    """Files and classes of each way, and the state enums on all of them."""
    found: dict[str, float] = {}
    for name in COUNTED:
        way = ways[name]
        found[f"{name}: files"] = len(way.files)
        found[f"{name}: classes"] = len(way.classes)
    found["state enums on the way of a request"] = len(states_on(ways))
    return found


def states_on(ways: Mapping[str, Way]) -> list[str]:
    """The state enums that the functions of the ways name."""
    named = set().union(*(way.names for way in ways.values()))
    return sorted(name for name in state_enums(modules_of(PACKAGE)) if name in named)


def as_text(found: Mapping[str, float]) -> str:
    width = max(map(len, found))
    return "\n".join(f"{name:{width}}  {value:>9,}" for name, value in found.items())


def walks_as_text(ways: Mapping[str, Way]) -> str:
    parts = []
    for name, way in ways.items():
        steps = names_of(walk(way))
        parts.append("\n".join([f"{name}:", *(f"{number:3}. {step}" for number, step in enumerate(steps, 1))]))
    return "\n\n".join(parts)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.house", description=__doc__)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="as JSON, with the names of files and state enums")
    form.add_argument("--walks", action="store_true", help="the steps of the five ways")
    form.add_argument("--code", action="store_true", help="only what the source tells")
    options = parser.parse_args(arguments)
    if options.code:
        print(as_text(code_figures()))
        return 0
    from benchmarks.house.ways import ways

    traced = asyncio.run(ways(PACKAGE))
    found = code_figures() | way_figures(traced)
    if options.walks:
        print(walks_as_text(traced))
    elif options.json:
        files = {name: traced[name].files for name in COUNTED}
        print(json.dumps({"figures": found, "state enums": states_on(traced), "files": files}, indent=1))
    else:
        print(as_text(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
