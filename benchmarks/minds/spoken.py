"""Spoken requests to a mind: the requests, read aloud by one voice, and the server that answers them with another."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from urllib.request import Request, urlopen

from benchmarks import server_process
from benchmarks.server_process import free_port

#: Of what is read aloud, in Hz.
SPEECH_RATE: Final = 24_000


def parser_of(*, name: str, about: str | None) -> argparse.ArgumentParser:
    """Return the parser of the options of the benchmark ``name``."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.minds.{name}", description=about)
    parser.add_argument("--llm", default="qwen", help="the mind [qwen]")
    parser.add_argument("--voice", default="kokoro:bm_george", help="who speaks to it [kokoro:bm_george]")
    parser.add_argument("--tts", default="hibari", help="who answers [hibari]")
    return parser


@contextmanager
def serving(*parts: str) -> Iterator[tuple[int, int]]:
    """Run a server that is ready; ``parts`` are its arguments. The block gets its port and the id of its process."""
    port = free_port()
    with server_process.serving(*parts, "--log-level", "warning", port=port) as server:
        yield port, server.pid


def read_aloud(sentences: Sequence[str], voice: str, folder: Path, *, silence: tuple[float, float]) -> list[str]:
    """Write each sentence to a file as pcm16; ``voice`` is a value of ``--tts``.

    ``silence`` is that before and after each, in seconds.
    """
    before, after = (bytes(2 * round(seconds * SPEECH_RATE)) for seconds in silence)
    files = []
    with serving("--llm", "rules", "--asr", "none", "--tts", voice) as (port, _):
        for number, sentence in enumerate(sentences):
            body = json.dumps({"model": "tts", "input": sentence, "response_format": "pcm"}).encode()
            with urlopen(Request(f"http://127.0.0.1:{port}/v1/audio/speech", body)) as answer:
                speech = answer.read()
            file = folder / f"{number:02}.pcm"
            file.write_bytes(before + speech + after)
            files.append(str(file))
    return files
