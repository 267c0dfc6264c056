"""``python -m benchmarks.house [--json | --walks | --code]`` prints how large the package is, and how far messages go.

The docstring of ``benchmarks.house.code`` says what counts, that of ``benchmarks.house.ways`` which ways are traced.
``--walks`` writes the steps of the five ways to docs/walks.md. ``--code`` runs no server. The spoken turn needs the
extras ``embedded``, ``whisper`` and a voice, and their weights.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from benchmarks.house.code import figures, modules_of, state_enums
from benchmarks.house.traces import Function, Way, walk

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


#: What stands above the walks. The ways are described where they are made: in ``benchmarks.house.ways``.
WALKS_HEAD: Final = """# Walks

How a message passes through the server, step by step: one function of each file, in the order in which they are
reached, with the first sentence of its docstring. Files are in `omni_ws/`. Made from call traces by
`python -m benchmarks.house --walks`.
"""


def walks_as_document(ways: Mapping[str, Way]) -> str:
    parts = [WALKS_HEAD]
    for name, way in ways.items():
        parts.append(f"\n## {name.capitalize()}\n\n")
        for number, step in enumerate(walk(way), 1):
            parts.append(f"{number}. `{step.file}`: `{step.name}`{_sentence(step)}\n")
    return "".join(parts)


def _sentence(function: Function) -> str:
    """The first sentence of a function's docstring, behind a colon; empty where it has none."""
    tree = ast.parse((PACKAGE / function.file).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _begins(node) == function.line:
            text = ast.get_docstring(node)
            return "" if text is None else f": {text.splitlines()[0].split('. ')[0].rstrip('.')}"
    return ""


def _begins(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return min([node.lineno, *(one.lineno for one in node.decorator_list)])


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.house", description=__doc__)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="as JSON, with the names of files and state enums")
    form.add_argument("--walks", action="store_true", help="write the steps of the five ways to docs/walks.md")
    form.add_argument("--code", action="store_true", help="only what the source tells")
    options = parser.parse_args(arguments)
    if options.code:
        print(as_text(code_figures()))
        return 0
    from benchmarks.house.ways import ways

    traced = asyncio.run(ways(PACKAGE))
    found = code_figures() | way_figures(traced)
    if options.walks:
        (ROOT / "docs" / "walks.md").write_text(walks_as_document(traced), encoding="utf-8")
    elif options.json:
        files = {name: traced[name].files for name in COUNTED}
        print(json.dumps({"figures": found, "state enums": states_on(traced), "files": files}, indent=1))
    else:
        print(as_text(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
