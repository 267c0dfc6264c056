"""Figures of a package that its source tells, without running it.

What counts, so that two trees can be compared:

- *Lines* are all lines of the Python files, blank ones too. Files in a folder ``generated`` count nowhere.
- A *code line* has a token that is no comment and belongs to no docstring. A *doc line* is a line of a docstring, a
  *comment line* has a comment and no code; both together, divided by the code lines, are docs a code line.
- *Import lines* are those of import statements, also within functions, in per cent of all lines.
- An *importer* of a module is another module with a statement that names it: ``import a.b``, ``from a import b``, and
  ``from a.b import name``. A package's ``__init__`` is imported by those alone that take a name of its own.
- *Classes* are class statements at any depth.
- A *Protocol* is a class with the base ``Protocol``, which ``asyncio.Protocol`` is not. A class implements it if it
  inherits from it, directly or not, or if it has every member of it: methods, class attributes, and attributes that its
  methods set on ``self``. Members inherited from classes of the package count. A Protocol whose only member is
  ``__call__`` counts as one with two implementers: functions implement it.
- A *write into another object* is an assignment, of any kind, whose target is an attribute of anything but a plain
  ``self`` or ``cls``: ``request.state = x``, ``self.stream.limits = x``, ``a.b += 1``; each target of ``a.b, c.d = …``
  counts. ``self.x[0] = y`` and ``setattr`` do not.
- A *state enum* is an Enum whose members are assigned to attributes, or that is called a state, stage or phase, or one
  of ``NAMED_STATES``. A StrEnum is a state by its name alone, since most of them are words of the wire. Which of them
  lie on the way of a request, the call traces tell.
- *JSON* counts modules that import the standard library's ``json``, and uses of a name of it; *aclosing* counts calls.
- The *rules' mind* is everything in ``engine/llm`` whose name does not begin with ``gguf``.
- *Data lines* are those of the TOML, text and CSV files in the package.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

#: Above this a module is no longer one idea.
LONG_MODULE: Final = 800
DATA_SUFFIXES: Final = (".toml", ".txt", ".csv", ".tsv", ".jsonl")
STATE_WORDS: Final = ("State", "Stage", "Phase")
#: States by their use, whatever stores them.
NAMED_STATES: Final = frozenset({"Milestone", "Serving", "Parsing", "Pause", "Reading"})
_MIND: Final = ("engine", "llm")
_NOT_MIND: Final = "gguf"
_NO_CODE: Final = (
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
)


@dataclass(frozen=True, slots=True)
class Module:
    """One Python file."""

    name: str
    path: Path
    text: str
    tree: ast.Module

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())


@dataclass(slots=True)
class _Class:
    """A class as its statement tells it."""

    module: str
    node: ast.ClassDef
    bases: tuple[str, ...]
    members: set[str] = field(default_factory=set)


def modules_of(package: Path) -> list[Module]:
    """The Python files of ``package``, by name."""
    found = []
    for path in sorted(package.rglob("*.py")):
        if "generated" in path.relative_to(package).parts:
            continue
        parts = path.relative_to(package.parent).with_suffix("").parts
        text = path.read_text(encoding="utf-8")
        found.append(Module(".".join(parts[:-1] if parts[-1] == "__init__" else parts), path, text, ast.parse(text)))
    return found


def figures(package: Path) -> dict[str, float]:
    """All figures of the package in this folder, by name."""
    modules = modules_of(package)
    counts = _line_counts(modules)
    lines, code = counts["lines"], counts["code lines"]
    importers = importers_of(modules)
    classes = sum(isinstance(node, ast.ClassDef) for module in modules for node in ast.walk(module.tree))
    folders = Counter(module.path.parent for module in modules)
    protocols = implementers_of(modules)
    imports, uses = _json_uses(modules)
    return {
        "lines": lines,
        "code lines": code,
        "docs and comments a code line": round((counts["doc lines"] + counts["comment lines"]) / max(code, 1), 3),
        "data lines": sum(data_lines(package).values()),
        "modules": len(modules),
        "mean lines of a module": round(lines / max(len(modules), 1), 1),
        f"modules above {LONG_MODULE} lines": sum(module.lines > LONG_MODULE for module in modules),
        "most files in a folder": max(folders.values(), default=0),
        "classes": classes,
        "classes a 1,000 code lines": round(1000 * classes / max(code, 1), 1),
        "import lines, %": round(100 * counts["import lines"] / max(lines, 1), 2),
        "modules with one importer": sum(len(importers[module.name]) == 1 for module in modules),
        "Protocols": len(protocols),
        "Protocols with at most one implementer": sum(len(names) <= 1 for names in protocols.values()),
        "writes into another object": sum(1 for _ in object_writes(modules)),
        "modules that import json": imports,
        "uses of json": uses,
        "aclosing": sum(_calls(module.tree, "aclosing") for module in modules),
        "lines of the rules' mind": sum(module.lines for module in modules if _is_mind(module, package)),
    }


def data_lines(package: Path) -> dict[str, int]:
    """Lines of the data files in ``package``, by their place."""
    return {
        path.relative_to(package).as_posix(): len(path.read_text(encoding="utf-8").splitlines())
        for path in sorted(package.rglob("*"))
        if path.suffix in DATA_SUFFIXES and path.is_file()
    }


def importers_of(modules: Iterable[Module]) -> dict[str, set[str]]:
    """The modules that import each module."""
    modules = list(modules)
    found: dict[str, set[str]] = {module.name: set() for module in modules}
    for module in modules:
        for node in ast.walk(module.tree):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                inner = [f"{node.module}.{alias.name}" for alias in node.names]
                names = [name if name in found else node.module or "" for name in inner]
            for name in names:
                if name in found and name != module.name:
                    found[name].add(module.name)
    return found


def implementers_of(modules: Iterable[Module]) -> dict[str, list[str]]:
    """The classes that implement each Protocol which is no bare function, by its name."""
    classes = _classes(modules)
    by_name = {one.node.name: one for one in reversed(classes)}
    protocols = [one for one in classes if "Protocol" in one.bases]
    names = {one.node.name for one in protocols}
    reach = {id(one): _reached(one, by_name) for one in classes}
    found: dict[str, list[str]] = {}
    for protocol in protocols:
        wanted = reach[id(protocol)][1]
        found[protocol.node.name] = [
            f"{one.module}.{one.node.name}"
            for one in classes
            if one.node.name not in names
            and (protocol.node.name in reach[id(one)][0] or (wanted and wanted <= reach[id(one)][1]))
        ]
        if wanted == {"__call__"}:
            found[protocol.node.name] += ["a function", "another"]
    return found


def object_writes(modules: Iterable[Module]) -> Iterator[tuple[str, int, str]]:
    """Module, line and target of each write into another object."""
    for module in modules:
        for node in ast.walk(module.tree):
            for target in _targets(node):
                if isinstance(target, ast.Attribute) and not _is_own(target.value):
                    yield module.name, target.lineno, ast.unparse(target)


def state_enums(modules: Iterable[Module]) -> dict[str, str]:
    """The module of each state enum, by its name."""
    modules = list(modules)
    enums: dict[str, tuple[str, bool]] = {}
    for one in _classes(modules):
        if any(base.endswith(("Enum", "Flag")) for base in one.bases):
            enums[one.node.name] = (one.module, "StrEnum" in one.bases)
    stored = set()
    for module in modules:
        for node in ast.walk(module.tree):
            if any(isinstance(target, ast.Attribute) for target in _targets(node)):
                stored |= {name for inner in ast.walk(node) if (name := _member_of(inner)) in enums}
    return {
        name: module
        for name, (module, is_word) in sorted(enums.items())
        if name.endswith(STATE_WORDS) or name in NAMED_STATES or (name in stored and not is_word)
    }


def _member_of(node: ast.AST) -> str | None:
    """The name in front of the point of ``Name.MEMBER``."""
    return node.value.id if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) else None


def _line_counts(modules: Iterable[Module]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for module in modules:
        docs, imports = set(), set()
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                docs |= _docstring_lines(node)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                imports |= _span(node)
        code, comments = set(), set()
        for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
            if token.type == tokenize.COMMENT:
                comments.add(token.start[0])
            elif token.type not in _NO_CODE:
                code |= set(range(token.start[0], token.end[0] + 1))
        code -= docs
        counts["lines"] += module.lines
        counts["code lines"] += len(code)
        counts["doc lines"] += len(docs)
        counts["comment lines"] += len(comments - code)
        counts["import lines"] += len(imports)
    return counts


def _docstring_lines(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> set[int]:
    first = node.body[0] if node.body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        return _span(first)
    return set()


def _span(node: ast.stmt) -> set[int]:
    return set(range(node.lineno, (node.end_lineno or node.lineno) + 1))


def _classes(modules: Iterable[Module]) -> list[_Class]:
    found = []
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                names = [ast.unparse(base).partition("[")[0] for base in node.bases]
                bases = tuple(name.rpartition(".")[2] for name in names if name != "asyncio.Protocol")
                found.append(_Class(module.name, node, bases, set(_members(node))))
    return found


def _members(node: ast.ClassDef) -> Iterator[str]:
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            yield statement.name
            for inner in ast.walk(statement):
                for target in _targets(inner):
                    if isinstance(target, ast.Attribute) and _is_own(target.value):
                        yield target.attr
        else:
            for target in _targets(statement):
                if isinstance(target, ast.Name):
                    yield target.id


def _reached(one: _Class, by_name: dict[str, _Class]) -> tuple[set[str], set[str]]:
    """All bases of a class by name, and all its members, those of its bases too."""
    bases: set[str] = set()
    members = set(one.members)
    waiting = list(one.bases)
    while waiting:
        name = waiting.pop()
        if name not in bases:
            bases.add(name)
            if name in by_name:
                members |= by_name[name].members
                waiting += by_name[name].bases
    return bases, members


def _targets(node: ast.AST) -> Iterator[ast.expr]:
    """What an assignment writes to, taken apart."""
    waiting: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        waiting = list(node.targets)
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        waiting = [node.target]
    while waiting:
        target = waiting.pop(0)
        if isinstance(target, ast.Tuple | ast.List):
            waiting = [*target.elts, *waiting]
        elif isinstance(target, ast.Starred):
            waiting = [target.value, *waiting]
        else:
            yield target


def _is_own(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _json_uses(modules: Iterable[Module]) -> tuple[int, int]:
    imports = uses = 0
    for module in modules:
        names = set()
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Import):
                names |= {alias.asname or alias.name for alias in node.names if alias.name == "json"}
            elif isinstance(node, ast.ImportFrom) and node.module == "json":
                names |= {alias.asname or alias.name for alias in node.names}
        imports += bool(names)
        uses += sum(
            isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in names
            for node in ast.walk(module.tree)
        )
    return imports, uses


def _calls(tree: ast.AST, name: str) -> int:
    return sum(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
        for node in ast.walk(tree)
    )


def _is_mind(module: Module, package: Path) -> bool:
    parts = module.path.relative_to(package).parts
    return parts[:2] == _MIND and not parts[2].startswith(_NOT_MIND)
