"""The blocks of code in the documents: which there are, what of a shell's runs, and what starts a server."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
#: Those that are read as manuals; of the others in docs/ none has a block that somebody could run.
DOCUMENTS: Final = sorted([ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("docs/guides/*.md")])
SHELL: Final = frozenset({"sh", "bash", "shell", "console"})

_FENCED: Final = re.compile(
    r"(?:^ *<!-- (?P<marker>.*?) -->\n\n?)?^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)
#: What a block may need that a machine which only tests has not.
_NEEDS: Final = "(?:a GPU|vLLM|an account|root|a network|a microphone|another machine|other software|weights)"
NOT_RUN: Final = re.compile(
    rf"not run: (?:needs {_NEEDS}(?:(?:, {_NEEDS})* and {_NEEDS})?|takes minutes|the form of a command"
    r"|part of a program)(?:; [^;]+)?"
)
RUN_BY: Final = re.compile(r"run by (tests/[\w/]+\.py)")
#: A line that starts a server, with the variables before it.
_STARTS: Final = re.compile(r"^(?P<variables>(?:\w+=\S+ +)*)(?P<command>make serve\b.*|\S*bin/omni-ws serve\b.*)$")


@dataclass(frozen=True, slots=True)
class Block:
    document: str
    line: int
    language: str
    text: str
    #: What the comment above it says of how it is run, or "".
    marker: str

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"

    @property
    def lines(self) -> list[str]:
        """A shell's commands, a continued one in one line, without lines of comments."""
        joined = re.sub(r" *\\\n *", " ", self.text)
        return [line for line in joined.splitlines() if line.strip() and not line.lstrip().startswith("#")]

    @property
    def starts(self) -> list[str]:
        """The lines that start a server."""
        return [line for line in self.lines if _STARTS.match(line)]

    @property
    def script(self) -> str:
        """What is left for a shell beside a server that runs already."""
        return "".join(f"{line}\n" for line in self.lines if not _STARTS.match(line))


def blocks(document: Path, text: str | None = None) -> list[Block]:
    """The blocks of a document that have a language."""
    text = document.read_text(encoding="utf-8") if text is None else text
    name = str(document.relative_to(ROOT))
    found = []
    for match in _FENCED.finditer(text):
        line = text.count("\n", 0, match.start("language")) + 1
        lines = match["text"].splitlines(keepends=True)
        body = "".join(one.removeprefix(match["indent"]) for one in lines)
        found.append(Block(name, line, match["language"], body, match["marker"] or ""))
    return [block for block in found if block.language]


def serve_arguments(start: str) -> tuple[list[str], dict[str, str]]:
    """The arguments of ``omni-ws`` and the variables that a line sets which starts a server.

    What make would run is what make says; whatever it would install first counts as installed.
    """
    found = _STARTS.match(start)
    assert found is not None
    variables = dict(one.split("=", 1) for one in shlex.split(found["variables"]))
    words = shlex.split(found["command"], comments=True)
    if words[0] == "make":
        # What the make that runs the tests was given is not a reader's.
        environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "ARGS")}
        words = [*words, "--dry-run", "--no-print-directory"]
        made = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert made.returncode == 0, f"{start}\n{made.stderr}"
        words = shlex.split(made.stdout.replace("\\\n", " ").splitlines()[-1])
        if "serve-tiny" in found["command"]:
            return [], variables
    program = next((place for place, word in enumerate(words) if word.endswith(("bin/omni-ws", "omni_ws"))), None)
    assert program is not None, f"{start}: {words}"
    arguments = words[program + 1 :]
    return arguments if arguments[:1] == ["serve"] else ["serve", *arguments], variables
