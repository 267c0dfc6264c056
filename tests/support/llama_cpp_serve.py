"""llama.cpp's own HTTP server in a process of its own, from the package xllamacpp, with SmolLM2's weights."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pytest
from support.commands import read_message
from support.real_models import fetched

from omni_ws.engine.child_main import encode_message
from omni_ws.engine.llm.gguf_server import FromModel, Order

CONTEXT: Final = 512
KEY: Final = "the key of a test"
#: SmolLM2's template with tools, which its own leaves out.
TOOLS_TEMPLATE: Final = Path(__file__).parents[1] / "data" / "chatml_tools.jinja"


def smollm2_file() -> Path:
    """SmolLM2's weights. Skips the test where they, or what runs them, cannot be had."""
    if find_spec("xllamacpp") is None:
        pytest.skip("llama.cpp's server needs the package xllamacpp, which is there for Linux on x86-64")
    return next(fetched("smollm2").glob("*.gguf"))


@contextmanager
def llama_cpp_server(chat_template: Path | None = None) -> Iterator[int]:
    """The port of one, for whoever has KEY. Skips the test where it cannot be had."""
    order = Order(
        file=str(smollm2_file()),
        name="smollm2",
        key=KEY,
        context=CONTEXT,
        parallel=1,
        threads=1,
        think=True,
        chat_template=None if chat_template is None else chat_template.read_text(),
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "omni_ws.engine.llm.gguf_server"],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(encode_message(order))
            process.stdin.flush()
            served, _ = read_message(process.stdout, FromModel)
            yield int(served.address.rpartition(":")[2])
            assert process.poll() is None, f"llama.cpp's server ended by itself, status {process.returncode}"
        finally:
            process.kill()
