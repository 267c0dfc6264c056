"""The blocks of code in the documents work: shells and programs run beside one server, and say if they cannot.

A line that starts a server is read to the end of its settings; the servers themselves are for other tests. A comment
above a block, which readers do not see, says that another test runs it, or what it needs that is not here.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import os
import re
import signal
import sys
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from support.commands import run_here
from support.document_blocks import DOCUMENTS, NOT_RUN, ROOT, RUN_BY, SHELL, Block, blocks, serve_arguments
from support.embedded_engine import EmbeddedEngine
from support.live_server import live_server
from support.patience import PATIENCE_SEC
from support.voices import need

from omni_ws.cli import main
from omni_ws.config.model import VoiceChoice

BLOCKS = [block for document in DOCUMENTS for block in blocks(document)]
COMMANDS = [block for block in BLOCKS if block.language in SHELL]
PROGRAMS = [block for block in BLOCKS if block.language == "python"]
#: What the documents' server listens at.
ADDRESS = re.compile(r"\b(127\.0\.0\.1|localhost):8080\b")
#: Programs of this project that ask this address unless they are told another.
WITHOUT_ADDRESS = re.compile(r"(bin/omni-ws (?:replay|bench)|examples/\w+_client\.py)(?= )(?!.* --url)")
#: A block that begins so is a file, which the commands of the same document use.
FILE = re.compile(r"# ([\w.-]+\.(?:yaml|toml|py))$", re.MULTILINE)
FUTURE = "from __future__ import annotations\n"
AS_IN_A_NOTEBOOK = """
import ast, asyncio, inspect, sys
waiting = eval(compile(sys.argv[1], "<document>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), {"__name__": "__main__"})
if inspect.isawaitable(waiting):
    asyncio.run(waiting)
"""


@dataclass(frozen=True, slots=True)
class Clone:
    """A folder that looks like the clone in which readers are, and the server that they have started there."""

    folder: Path
    port: int

    async def run(self, *command: str) -> str:
        """The output of a command that succeeds."""
        home = str(self.folder.parent / "home")
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("OMNI_WS_")},
            "HOME": home,
            "CURL_HOME": home,
            "PATH": f"{home}/bin:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
        }
        process = await asyncio.create_subprocess_exec(
            *command, env=environment, cwd=self.folder, stdout=PIPE, stderr=STDOUT, start_new_session=True
        )
        try:
            async with asyncio.timeout(PATIENCE_SEC):
                output, _ = await process.communicate()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        assert process.returncode == 0, output.decode()[-4000:]
        return output.decode()

    async def shell(self, script: str) -> str:
        script = re.sub(r"  +#.*", "", script)
        script = ADDRESS.sub(rf"\1:{self.port}", script)
        script = WITHOUT_ADDRESS.sub(rf"\1 --url ws://127.0.0.1:{self.port}", script)
        script = script.replace(f"client.py --url ws://127.0.0.1:{self.port}", rf"client.py --url {self.native}")
        output = await self.run("bash", "-euo", "pipefail", "-c", script)
        assert '"error":' not in output, output[-4000:]
        return output

    async def python(self, program: str) -> str:
        """What a program prints that may wait outside of functions, as in a notebook."""
        program = ADDRESS.sub(rf"\1:{self.port}", program)
        return await self.run(sys.executable, "-c", AS_IN_A_NOTEBOOK, program)

    @property
    def native(self) -> str:
        return f"ws://127.0.0.1:{self.port}/v1/streaming_input"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def clone(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Clone]:
    voice = need(VoiceChoice.ESPEAK)
    home = tmp_path_factory.mktemp("reader") / "home"
    folder = home.parent / "clone"
    (home / "bin").mkdir(parents=True)
    # An answer with an error is a failure, and the microphone of this machine plays a recording.
    (home / ".curlrc").write_text("fail-with-body\nsilent\nshow-error\n")
    (home / "bin" / "arecord").write_text(f"#!/bin/sh\nexec cat '{ROOT / 'tests' / 'data' / 'goforward.wav'}'\n")
    (home / "bin" / "arecord").chmod(0o755)
    folder.mkdir()
    for one in ROOT.iterdir():
        if one.name not in (".venv", "recordings"):
            (folder / one.name).symlink_to(one)
    (folder / ".venv").symlink_to(sys.prefix)
    engine = EmbeddedEngine(voice=voice, max_recognisers=2)
    profiles = {"root": str(home / ".cache" / "omni_ws" / "profiles")}
    async with live_server(engine, record=str(folder / "recordings"), profiler=profiles) as server:
        yield Clone(folder, server.port)


@pytest.mark.parametrize("block", COMMANDS + PROGRAMS, ids=str)
def test_a_block_runs_or_says_why_not(block: Block) -> None:
    if by := RUN_BY.fullmatch(block.marker):
        assert Path(block.document).name in (ROOT / by[1]).read_text(encoding="utf-8"), "the test does not read it"
    elif block.marker:
        assert NOT_RUN.fullmatch(block.marker), f"not a reason: {block.marker}"
        assert block.language == "python" or block.script, "a start of a server needs no comment"
    else:
        assert not re.search(r"^(?:make|sudo|apt)\b|\bpip install\b", block.script, re.MULTILINE), (
            "this changes the machine"
        )


@pytest.mark.parametrize("block", [block for block in COMMANDS if block.starts], ids=str)
def test_a_server_that_is_started_has_these_settings(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tests" / "data" / "plugin")
    for start in block.starts:
        arguments, variables = serve_arguments(start)
        if arguments:
            ended = run_here(main, *arguments, "--print-config", environ=variables)
            assert ended.status == 0, f"{start}\n{ended.errors}"


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("block", [block for block in COMMANDS if block.script and not block.marker], ids=str)
async def test_commands(block: Block, clone: Clone) -> None:
    for other in BLOCKS:
        if other.document == block.document and (name := FILE.match(other.text)):
            (clone.folder / name[1]).write_text(other.text, encoding="utf-8")
    await clone.shell(block.script)


@pytest.mark.parametrize("block", PROGRAMS, ids=str)
def test_a_program_is_one(block: Block) -> None:
    compile(block.text, str(block), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("document", sorted({block.document for block in PROGRAMS if not block.marker}))
async def test_programs(document: str, clone: Clone) -> None:
    """Those of a document follow one another, as in a notebook."""
    parts = [block.text for block in PROGRAMS if block.document == document and not block.marker]
    await clone.python(FUTURE + "\n".join(one.replace(FUTURE, "") for one in parts))


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    "broken",
    [
        'curl http://127.0.0.1:8080/v1/audio/speach -d \'{"input":"Good morning."}\' -o morning.mp3',
        'curl http://127.0.0.1:8080/v1/audio/speech -d \'{"imput":"Good morning."}\' -o morning.mp3',
        "false\ntrue",
        "cat none | cat",
        ".venv/bin/python examples/mic_client.py --flie tests/data/goforward.wav",
    ],
)
async def test_a_command_that_is_broken_is_found(broken: str, clone: Clone) -> None:
    with pytest.raises(AssertionError):
        await clone.shell(broken)


@pytest.mark.parametrize(
    "broken", ["make serve ARGS=--prot", ".venv/bin/omni-ws serve --tts.vioce x", "make serve MODEL=x"]
)
def test_a_start_that_is_broken_is_found(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError):
        test_a_server_that_is_started_has_these_settings(Block("x", 1, "sh", broken, ""), monkeypatch)
