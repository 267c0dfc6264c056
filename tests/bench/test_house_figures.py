"""How the benchmark of the house counts, on a small package, and what it reads out of call traces."""

from __future__ import annotations

import importlib
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.house.code import figures, implementers_of, importers_of, modules_of, object_writes, state_enums
from benchmarks.house.traces import Call, Function, Trace, Way, walk, way_of

PARTS = '''"""Doors and keys."""

import json
from enum import Enum, StrEnum
from typing import Protocol


class DoorState(Enum):
    OPEN = 1
    SHUT = 2


class Mood(Enum):
    GOOD = 1


class Word(StrEnum):
    YES = "yes"


class Opens(Protocol):
    # What opens.
    name: str

    def open(self) -> None: ...


class Shuts(Protocol):
    def shut(self) -> None: ...


class Waits(Protocol):
    def __call__(self) -> None: ...


class Door:
    """A door."""

    def __init__(self, name: str) -> None:
        self.name, self.keys[0] = name, 1  # its own
        self.mood, self.word = Mood.GOOD, Word.YES

    def open(self) -> None:
        self.lock.state = DoorState.OPEN


class Gate(Door):
    def shut(self) -> None:
        json.dumps(json.loads("1"))
'''
USES = """from contextlib import aclosing

from house_sample import parts
from house_sample.parts import Door


async def walk_in(door, other):
    (door.state, place), other.count = (1, 2), 3
    door.count += 1
    async with aclosing(door.steps()):
        from house_sample import inner
    parts.Door("front")
    inner.run(Door)
"""
INNER = """def run(what):
    return Stair().climb(what)


class Stair:
    def climb(self, what):
        from house_sample.inner_room import rest

        return [rest() for _ in range(2)]
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "house_sample"
    files = {
        "__init__.py": "",
        "parts.py": PARTS,
        "uses.py": USES,
        "inner.py": INNER,
        "inner_room.py": "def rest():\n    return 1\n",
        "generated/made.py": "import json\nx.y = 1\n",
        "words.toml": "a = 1\n\nb = 2\n",
        "engine/llm/rules_engine.py": "RULES = ()\nMORE = ()\n",
        "engine/llm/gguf_engine.py": "GGUF = ()\n",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_lines_and_classes_are_counted(package: Path) -> None:
    found = figures(package)
    code = sum(bool(line.strip()) for text in (PARTS, USES, INNER) for line in text.splitlines()) - 3 + 2 + 3
    assert found["lines"] == sum(len(text.splitlines()) for text in (PARTS, USES, INNER)) + 2 + 3
    assert found["code lines"] == code
    assert found["docs and comments a code line"] == round(3 / code, 3)
    assert found["data lines"] == 3
    assert (found["modules"], found["most files in a folder"]) == (7, 5)
    assert (found["classes"], found["classes a 1,000 code lines"]) == (9, round(9000 / code, 1))
    assert found["import lines, %"] == round(100 * 8 / found["lines"], 2)
    assert (found["modules that import json"], found["uses of json"], found["aclosing"]) == (1, 2, 1)
    assert found["lines of the rules' mind"] == 2
    assert found["modules above 800 lines"] == 0


def test_a_long_module_is_counted(package: Path) -> None:
    (package / "long.py").write_text("x = 1\n" * 801)
    assert figures(package)["modules above 800 lines"] == 1


def test_importers_are_modules_that_name_a_module(package: Path) -> None:
    found = importers_of(modules_of(package))
    assert found["house_sample.parts"] == {"house_sample.uses"}
    assert found["house_sample.inner"] == {"house_sample.uses"}
    assert found["house_sample.inner_room"] == {"house_sample.inner"}
    assert found["house_sample"] == set()
    assert figures(package)["modules with one importer"] == 3


def test_protocols_have_implementers_by_name_or_by_members(package: Path) -> None:
    found = implementers_of(modules_of(package))
    assert found["Opens"] == ["house_sample.parts.Door", "house_sample.parts.Gate"]
    assert found["Shuts"] == ["house_sample.parts.Gate"]
    assert len(found["Waits"]) > 1
    assert figures(package)["Protocols with at most one implementer"] == 1


def test_writes_into_other_objects_are_told_from_own(package: Path) -> None:
    assert [target for _, _, target in object_writes(modules_of(package))] == [
        "self.lock.state",
        *("door.state", "other.count", "door.count"),
    ]


def test_states_are_stored_or_called_so(package: Path) -> None:
    assert state_enums(modules_of(package)) == {"DoorState": "house_sample.parts", "Mood": "house_sample.parts"}


@pytest.fixture
def inner(package: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(package.parent))
    for name in [name for name in sys.modules if name.startswith("house_sample")]:
        monkeypatch.delitem(sys.modules, name)
    module = importlib.import_module("house_sample.inner")
    module.run(None)
    return module


def test_a_trace_has_calls_with_their_callers(package: Path, inner: ModuleType) -> None:
    trace = Trace(package)
    with trace.watching():
        inner.run(None)  # before it begins
        trace.begin()
        inner.run(None)
        worker = threading.Thread(target=inner.run, args=(None,))
        worker.start()
        worker.join()
        calls = trace.end()
        inner.run(None)
        trace.begin()
        assert trace.end() == []
    once = [("run", None), ("Stair.climb", 0), ("Stair.climb.<locals>.<listcomp>", 1), ("rest", 2), ("rest", 2)]
    if sys.version_info >= (3, 12):  # which has no function for a comprehension
        once = [("run", None), ("Stair.climb", 0), ("rest", 1), ("rest", 1)]
    again = [(name, None if caller is None else caller + len(once)) for name, caller in once]
    assert [(call.function.name, call.caller) for call in calls] == once + again
    way = way_of([calls])
    assert way.files == ["inner.py", "inner_room.py"]
    assert way.classes == ["inner.py:Stair"]
    assert "rest" in way.names


def _call(file: str, name: str, caller: int | None = None) -> Call:
    return Call(Function(file, name, 1), caller)


def test_a_way_is_what_all_its_traces_touch() -> None:
    way = way_of([[_call("a.py", "a"), _call("b.py", "tick")], [_call("a.py", "a"), _call("a.py", "late")]])
    assert way.functions == {Function("a.py", "a", 1)}
    assert way.files == ["a.py"]


def test_a_walk_keeps_the_steps_that_lead_furthest() -> None:
    calls = [
        *(_call("a.py", "A.__init__"), _call("a.py", "first"), _call("b.py", "leaf", 1), _call("c.py", "second", 1)),
        *(_call("d.py", "third", 3), _call("e.py", "last", 4), _call("f.py", "alone")),
    ]
    way = Way(calls, {call.function for call in calls})
    assert [str(step) for step in walk(way, most=3)] == ["a.py: first", "c.py: second", "d.py: third"]
    assert len(walk(way)) == 6
