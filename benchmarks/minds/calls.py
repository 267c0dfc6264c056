"""``python -m benchmarks.minds.calls [--llm MIND]``: spoken requests to an agent with two tools, and what it called.

Each request of ``calls.toml`` is read aloud by one voice, heard and answered by a server with the mind and another
voice, in a conversation of its own: OpenAI's Agents SDK over ``/v1/realtime``, whose Python is that of ``make
test-outside`` (or ``OUTSIDE_PYTHON``). A request counts if its calls, and no others, were made, with the right
arguments. At the end stand the memory of all processes of the server (PSS) and the CPU time of an average request.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final
from urllib.request import Request, urlopen

from benchmarks.minds.__main__ import wait_until_ready
from benchmarks.server_process import child_processes, cpu_seconds, free_port, proportional_mib, running

REQUESTS: Final = Path(__file__).with_name("calls.toml")
AGENT: Final = Path(__file__).with_name("agent.py")
#: The kinds of requests in `calls.toml`, each with how many must be right.
KINDS: Final = {"one": 18, "two": 0, "none": 0}
#: Of what is read aloud, in Hz.
SPEECH_RATE: Final = 24_000
#: Of silence before a request, and after it, in seconds.
_SILENCE: Final = (0.5, 2.0)


def read_aloud(
    sentences: Sequence[str], voice: str, folder: Path, *, silence: tuple[float, float] = _SILENCE
) -> list[str]:
    """Write each sentence to a file as pcm16 between silences; ``voice`` is a value of ``--tts``."""
    before, after = (bytes(2 * round(seconds * SPEECH_RATE)) for seconds in silence)
    port, files = free_port(), []
    parts = ("--llm", "rules", "--asr", "none", "--tts", voice, "--log-level", "warning")
    with running("omni_ws", "serve", *parts, port=port):
        wait_until_ready(f"http://127.0.0.1:{port}/health")
        for number, sentence in enumerate(sentences):
            body = json.dumps({"model": "tts", "input": sentence, "response_format": "pcm"}).encode()
            with urlopen(Request(f"http://127.0.0.1:{port}/v1/audio/speech", body)) as answer:
                speech = answer.read()
            file = folder / f"{number:02}.pcm"
            file.write_bytes(before + speech + after)
            files.append(str(file))
    return files


def plain(calls: Sequence[Any]) -> list[str]:
    """Return calls in a form in which those that are the same are equal: texts without case, the calls in order."""
    return sorted(json.dumps(call, sort_keys=True).lower() for call in calls)


def main(arguments: Sequence[str] | None = None) -> bool:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.minds.calls", description=__doc__)
    parser.add_argument("--llm", default="qwen", help="the mind [qwen]")
    parser.add_argument("--voice", default="kokoro:bm_george", help="who makes the requests [kokoro:bm_george]")
    parser.add_argument("--tts", default="hibari", help="who answers [hibari]")
    options = parser.parse_args(arguments)
    told = tomllib.loads(REQUESTS.read_text("utf-8"))
    rows = [(kind, row) for kind in KINDS for row in told[kind]]
    python = os.environ.get("OUTSIDE_PYTHON", ".venv-outside/bin/python")
    port = free_port()
    parts = ("--llm", options.llm, "--tts", options.tts, "--log-level", "warning")
    right = dict.fromkeys(KINDS, 0)
    with tempfile.TemporaryDirectory() as folder:
        speech = read_aloud([row["say"] for _, row in rows], options.voice, Path(folder))
        url = f"ws://127.0.0.1:{port}/v1/realtime?model=omni"
        order = {"url": url, "instructions": told["instructions"], "tools": told["tool"], "speech": speech}
        with running("omni_ws", "serve", *parts, port=port) as server:
            wait_until_ready(f"http://127.0.0.1:{port}/health")
            processes = (server.pid, *child_processes(server.pid))
            before = sum(map(cpu_seconds, processes))
            agent = subprocess.Popen([python, str(AGENT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            with agent:
                assert agent.stdin is not None
                assert agent.stdout is not None
                agent.stdin.write(json.dumps(order).encode())
                agent.stdin.close()
                for (kind, row), line in zip(rows, agent.stdout, strict=True):
                    seen = json.loads(line)
                    is_right = plain(seen["calls"]) == plain(row["calls"]) and "failed" not in seen
                    right[kind] += is_right
                    print(
                        f"{'right' if is_right else 'WRONG'} ({seen.pop('seconds'):.1f} s) {row['say']}\n      {seen}"
                    )
            print(f"\nPSS of all processes: {sum(map(proportional_mib, processes)) * 1024**2 / 1e9:.2f} GB")
            print(f"CPU time of a request: {(sum(map(cpu_seconds, processes)) - before) / len(rows):.1f} s")
    for kind, least in KINDS.items():
        print(f"{kind}: {right[kind]} of {len(told[kind])} right{f', wanted {least}' if least else ''}")
    return all(right[kind] >= least for kind, least in KINDS.items())


if __name__ == "__main__":
    raise SystemExit(0 if main() else 1)
