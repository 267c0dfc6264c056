"""Call traces of a package: which of its functions run while something happens, and who called them.

A trace sees every thread that began after ``watching`` did, and no other process: a voice that works in one is seen up
to its pipe. A generator that goes on counts as a call.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

#: A walk of more steps is not held in a head.
MAX_STEPS: Final = 12


@dataclass(frozen=True, slots=True, order=True)
class Function:
    """A function by the place of its text. ``file`` is relative to the package."""

    file: str
    name: str
    line: int

    @property
    def class_name(self) -> str | None:
        """The class in whose body the function stands."""
        outer = self.name.replace(".<locals>", "").split(".")[:-1]
        return next((f"{self.file}:{name}" for name in reversed(outer) if name.lstrip("_")[:1].isupper()), None)

    def __str__(self) -> str:
        return f"{self.file}: {self.name}"


@dataclass(frozen=True, slots=True)
class Call:
    """A call, the place of the call in the package from which it was made, and the names in its text.

    Functions of other packages may stand between the two calls; ``caller`` is None where none of this package is above.
    """

    function: Function
    caller: int | None
    names: tuple[str, ...] = ()


class Trace:
    """The calls of a package from ``begin`` to ``end``, in the order in which they began."""

    def __init__(self, package: Path) -> None:
        self._prefix = f"{package.resolve()}/"
        self._functions: dict[CodeType, Function | None] = {}
        self._local = threading.local()
        self._calls: list[Call] = []
        self._recording = 0

    def begin(self) -> None:
        self._calls = []
        self._recording += 1

    def end(self) -> list[Call]:
        """Ends the recording, and returns its calls."""
        calls, self._calls = self._calls, []
        self._recording += 1
        return calls

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watches this thread, and those that begin while the block runs."""
        threading.setprofile(self._notice)
        sys.setprofile(self._notice)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def _notice(self, frame: FrameType, event: str, _argument: Any) -> None:
        if event not in ("call", "return"):
            return
        code = frame.f_code
        try:
            function = self._functions[code]
        except KeyError:
            function = self._functions[code] = self._function(code)
        if function is None:
            return
        # A call's place is its index in one recording. Frames that were entered during an earlier one have none.
        if getattr(self._local, "recording", None) != self._recording:
            self._local.recording, self._local.stack = self._recording, []
        stack: list[tuple[CodeType, int]] = self._local.stack
        if event == "return":
            if stack and stack[-1][0] is code:
                stack.pop()
        elif self._recording % 2:
            calls = self._calls
            calls.append(Call(function, stack[-1][1] if stack else None, code.co_names))
            stack.append((code, len(calls) - 1))

    def _function(self, code: CodeType) -> Function | None:
        """The function of ``code``; None for what is not the package's, and for the body of a module or a class."""
        if not code.co_filename.startswith(self._prefix) or code.co_name == "<module>" or not code.co_flags & 2:
            return None
        return Function(code.co_filename.removeprefix(self._prefix), code.co_qualname, code.co_firstlineno)


@dataclass(slots=True)
class Way:
    """What one way through the package touches: the functions that run each time that the same thing happens."""

    calls: list[Call]
    functions: set[Function] = field(default_factory=set)

    @property
    def files(self) -> list[str]:
        return sorted({function.file for function in self.functions})

    @property
    def classes(self) -> list[str]:
        return sorted({name for function in self.functions if (name := function.class_name) is not None})

    @property
    def names(self) -> set[str]:
        """Every global name and attribute that the text of the functions has."""
        return {name for call in self.calls if call.function in self.functions for name in call.names}


def way_of(traces: Sequence[list[Call]]) -> Way:
    """The way that these traces of the same thing share. A timer that went off in one of them is left out."""
    shared = set.intersection(*({call.function for call in trace} for trace in traces))
    return Way(traces[-1], shared)


def walk(way: Way, most: int = MAX_STEPS) -> list[Function]:
    """The steps of a way: at most ``most`` functions, one a file, in the order in which they are reached.

    The step of a file is its function that leads furthest: beneath which, in what it calls and what that calls, the
    most files are reached. Where there are more files than steps, those remain whose steps lead furthest.
    """
    calls = way.calls
    beneath: list[set[str]] = [{call.function.file} for call in calls]
    for place in range(len(calls) - 1, -1, -1):
        caller = calls[place].caller
        if caller is not None:
            beneath[caller] |= beneath[place]
    steps: dict[str, int] = {}
    for place, call in enumerate(calls):
        if call.function in way.functions and not call.function.name.endswith("__"):
            best = steps.setdefault(call.function.file, place)
            if len(beneath[place]) > len(beneath[best]):
                steps[call.function.file] = place
    kept = sorted(steps.values(), key=lambda place: (-len(beneath[place]), place))[:most]
    return [calls[place].function for place in sorted(kept)]
