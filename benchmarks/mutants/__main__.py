"""``python -m benchmarks.mutants``: which small changes of the code the tests notice.

``choose`` picks mutants of the code. ``plant`` writes all of them into a copy of the tree, where the variable
``MUTANT`` names the one that acts (probe.py). Then the copy's tests run once, which shows which tests reach which
mutant. ``kill`` runs these tests for one mutant after another, the quickest first, until one fails::

    python -m benchmarks.mutants choose --count 200 --seed 34 mutants.json
    git worktree add --detach /tmp/planted && python -m benchmarks.mutants plant mutants.json /tmp/planted
    cd /tmp/planted && MUTANT_HITS=/tmp/hits pytest -p omni_ws.mutant_probe …
    python -m benchmarks.mutants kill mutants.json /tmp/planted /tmp/hits --report report.json

A mutant is found again by the text of its line, so the same ones can be planted into later code. Where lines are
gone, ``choose --keep mutants.json`` puts new mutants in their places, and leaves the others under their numbers.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

ROOTS: Final = ("core", "service", "transport/native", "transport/http", "transport/mode_b", "wire")

_SWAPS: Final[dict[type[ast.AST], str]] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
    ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Mod: "+",
}  # fmt: skip


class _Candidates(ast.NodeVisitor):
    """Expressions in functions, each with the text that replaces it."""

    def __init__(self, source: str) -> None:
        self._lines = source.splitlines()
        self.found: list[tuple[int, int, int, str]] = []  # line, from column, to column, replacement
        self._in_function = 0

    def text(self, node: ast.AST) -> str:
        return ast.unparse(node)

    def add(self, node: ast.expr, replacement: str) -> None:
        line = self._lines[node.lineno - 1]
        if self._in_function and node.lineno == node.end_lineno and line.isascii():
            self.found.append((node.lineno, node.col_offset, node.end_col_offset or 0, replacement))

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._in_function += 1
        for statement in node.body:
            self.visit(statement)
        self._in_function -= 1

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Positions in it are wrong before Python 3.12."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Assert(self, node: ast.Assert) -> None:
        """For the reader and the type checker."""

    def visit_match_case(self, node: ast.match_case) -> None:
        for each in (node.guard, *node.body):
            if each is not None:
                self.visit(each)

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1:
            left, right = self.text(node.left), self.text(node.comparators[0])
            self.add(node, f"({left}) {_SWAPS[type(node.ops[0])]} ({right})")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        other = " or " if isinstance(node.op, ast.And) else " and "
        self.add(node, other.join(f"({self.text(each)})" for each in node.values))
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if (other := _SWAPS.get(type(node.op))) is not None:
            self.add(node, f"({self.text(node.left)}) {other} ({self.text(node.right)})")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self.add(node, self.text(node.operand))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.add(node, str(not node.value))
        elif isinstance(node.value, int):
            self.add(node, str(node.value + 1))

    def visit_If(self, node: ast.If | ast.While | ast.IfExp) -> None:
        if not isinstance(node.test, ast.Compare | ast.BoolOp | ast.UnaryOp | ast.Constant):
            self.add(node.test, f"not ({self.text(node.test)})")
        self.generic_visit(node)

    visit_While = visit_If
    visit_IfExp = visit_If

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and not isinstance(node.value, ast.Constant):
            self.add(node.value, "None")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call | ast.Await):
            self.add(node.value, "None")
        self.generic_visit(node)


@dataclass(frozen=True)
class Mutant:
    """A change of one expression; ``text`` is its whole line, ``occurrence`` counts equal lines of the file."""

    path: str
    text: str
    occurrence: int
    start: int
    end: int
    replacement: str


def line_of(mutant: Mutant, lines: list[str]) -> int | None:
    """The index of the mutant's line, or ``None`` if it is gone."""
    same = [index for index, line in enumerate(lines) if line == mutant.text]
    return same[mutant.occurrence] if mutant.occurrence < len(same) else None


def _lines(package: Path, relative: str) -> list[str]:
    path = package / relative
    return path.read_text("utf-8").split("\n") if path.exists() else []


def choose(package: Path, *, count: int, seed: int, keep: list[Mutant]) -> list[Mutant]:
    """Mutants of the code, at most one a line; of those to keep, each that is still found stays where it is."""
    places = []
    for root in ROOTS:
        for path in sorted((package / root).rglob("*.py")):
            source = path.read_text("utf-8")
            finder = _Candidates(source)
            finder.visit(ast.parse(source))
            by_line = defaultdict(list)
            for number, start, end, replacement in finder.found:
                by_line[number].append((start, end, replacement))
            occurrences = Counter[str]()
            for number, text in enumerate(source.splitlines(), 1):
                relative = str(path.relative_to(package))
                places += [Mutant(relative, text, occurrences[text], *change) for change in by_line[number]]
                occurrences[text] += 1
    random.Random(seed).shuffle(places)
    kept = [each if line_of(each, _lines(package, each.path)) is not None else None for each in keep[:count]]
    chosen = {(each.path, each.text, each.occurrence): each for each in kept if each is not None}
    known = len(chosen)
    for place in places:
        if len(chosen) < count:
            chosen.setdefault((place.path, place.text, place.occurrence), place)
    fresh = iter(list(chosen.values())[known:])
    return [each or next(fresh) for each in kept] + list(fresh)


def plant(mutants: list[Mutant], package: Path) -> None:
    """Write the mutants into the package; a line that is no longer there is reported, and its mutant left out."""
    by_path = defaultdict(list)
    for number, mutant in enumerate(mutants):
        by_path[mutant.path].append((number, mutant))
    for relative, planted in by_path.items():
        path = package / relative
        original = _lines(package, relative)
        lines = original[:]
        for number, mutant in planted:
            if (index := line_of(mutant, original)) is None:
                print(f"gone: mutant {number}, {relative}: {mutant.text.strip()}", file=sys.stderr)
                continue
            before, replaced, behind = (
                mutant.text[: mutant.start], mutant.text[mutant.start : mutant.end], mutant.text[mutant.end :]
            )  # fmt: skip
            choice = f"(({mutant.replacement}) if _mutant({number}) else ({replaced}))"
            lines[index] = before + choice + behind
        if lines != original:
            source = "\n".join(lines)
            ast.parse(source, filename=str(path))
            path.write_text(source, "utf-8")
    shutil.copy(Path(__file__).with_name("probe.py"), package / "mutant_probe.py")
    head = package / "__init__.py"
    head.write_text(head.read_text("utf-8") + "\nimport omni_ws.mutant_probe\n", "utf-8")


def reached(hits: Path) -> tuple[dict[int, set[str]], dict[str, float]]:
    """The tests that reach each mutant, and how long each test that passed took."""
    seconds: dict[str, float] = defaultdict(float)
    failed = set()
    for line in Path(f"{hits}.tests").read_text("utf-8").splitlines():
        test, duration, outcome = line.split("\t")
        seconds[test] += float(duration)
        if outcome != "passed":
            failed.add(test)
    tests = defaultdict(set)
    for file in hits.iterdir():
        for line in file.read_text("utf-8").splitlines():
            number, _, test = line.partition("\t")
            if test in seconds and test not in failed:
                tests[int(number)].add(test)
    return tests, seconds


def _run(number: int, tests: list[str], tree: Path, *, command: list[str], limit_sec: float) -> str:
    """``killed``, ``survived`` or the reason why neither is known."""
    listed = tree / ".cache" / f"mutant-{number}.txt"
    listed.parent.mkdir(exist_ok=True)
    listed.write_text("\n".join(tests), "utf-8")
    environment = {**os.environ, "MUTANT": str(number), "PYTHONDONTWRITEBYTECODE": "1"}
    full = [*command, "-q", "-x", "-p", "no:cacheprovider", "--tb=line", f"@{listed}"]
    with (tree / ".cache" / f"mutant-{number}.log").open("wb") as log:
        process = subprocess.Popen(
            full, cwd=tree, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        try:
            status = process.wait(limit_sec)
        except subprocess.TimeoutExpired:  # an endless loop, which is noticed, or a busy machine
            os.killpg(process.pid, 9)
            process.wait()
            return "timed out"
    return {0: "survived", 1: "killed", 2: "killed"}.get(status, f"status {status}")


def kill(
    tree: Path, hits: Path, *, numbers: Iterable[int], jobs: int, chunks_sec: list[float], command: list[str]
) -> Iterator[dict[str, Any]]:
    tests, seconds = reached(hits)

    def one(number: int) -> dict[str, Any]:
        chosen = sorted(tests.get(number, ()), key=lambda test: (seconds[test], test))
        outcome, done = "not reached", 0
        for chunk_sec in chunks_sec:
            chunk: list[str] = []
            total = 0.0
            for test in chosen[done:]:
                if chunk and total + seconds[test] > chunk_sec:
                    break
                total += seconds[test]
                chunk.append(test)
            if not chunk:
                break
            outcome = _run(number, chunk, tree, command=command, limit_sec=120 + 10 * total)
            done += len(chunk)
            if outcome != "survived":
                break
        return {"mutant": number, "outcome": outcome, "tests": done, "of": len(chosen)}

    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(one, numbers)


def _read(mutants: Path) -> list[Mutant]:
    return [Mutant(**each) for each in json.loads(mutants.read_text("utf-8"))]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutants", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    chooser = commands.add_parser("choose")
    chooser.add_argument("mutants", type=Path)
    chooser.add_argument("--count", type=int, default=200)
    chooser.add_argument("--seed", type=int, default=34)
    chooser.add_argument("--keep", type=Path, metavar="MUTANTS", help="chosen before; those that are gone are replaced")
    planter = commands.add_parser("plant")
    planter.add_argument("mutants", type=Path)
    planter.add_argument("tree", type=Path)
    killer = commands.add_parser("kill")
    killer.add_argument("mutants", type=Path)
    killer.add_argument("tree", type=Path)
    killer.add_argument("hits", type=Path)
    killer.add_argument("--report", type=Path, required=True)
    killer.add_argument("--jobs", type=int, default=2)
    killer.add_argument(
        "--chunks", type=float, nargs="+", default=[5, 40], help="seconds of tests in each run for the same mutant"
    )
    killer.add_argument("--python", default=sys.executable, help="of the copy's environment")
    options = parser.parse_args()
    if options.command == "choose":
        keep = _read(options.keep) if options.keep else []
        chosen = choose(Path("omni_ws"), count=options.count, seed=options.seed, keep=keep)
        options.mutants.write_text(json.dumps([asdict(mutant) for mutant in chosen], indent=1) + "\n", "utf-8")
        return
    mutants = _read(options.mutants)
    if options.command == "plant":
        plant(mutants, options.tree / "omni_ws")
        return
    # A run goes on where the last one stopped.
    report = json.loads(options.report.read_text("utf-8")) if options.report.exists() else []
    ran = kill(
        options.tree, options.hits, numbers=range(len(report), len(mutants)), jobs=options.jobs,
        chunks_sec=options.chunks, command=[options.python, "-m", "pytest"],
    )  # fmt: skip
    for each in ran:
        report.append(each)
        print(each["mutant"], each["outcome"], f"{each['tests']}/{each['of']}", flush=True)
        options.report.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    print(Counter(each["outcome"] for each in report))


if __name__ == "__main__":
    main()
