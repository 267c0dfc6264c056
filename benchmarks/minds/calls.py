"""``python -m benchmarks.minds.calls [--llm MIND]``: spoken requests to an agent with two tools, and what it called.

Each request of ``calls.toml`` is read aloud by one voice, heard and answered by a server with the mind and another
voice, in a conversation of its own: OpenAI's Agents SDK over ``/v1/realtime``, whose Python is that of ``make
test-outside`` (or ``OUTSIDE_PYTHON``). A request counts if its calls, and no others, were made, with the right
arguments. At the end stand the memory of all processes of the server (PSS) and the CPU time of an average request.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.minds.spoken import parser_of, read_aloud, serving
from benchmarks.server_process import cpu_seconds_of_all, proportional_gb

REQUESTS: Final = Path(__file__).with_name("calls.toml")
AGENT: Final = Path(__file__).with_name("agent.py")
#: The kinds of requests in `calls.toml`, each with how many must be right.
KINDS: Final = {"one": 18, "two": 0, "none": 0}
#: Of silence before a request, and after it, in seconds.
_SILENCE: Final = (0.5, 2.0)


def plain(calls: Sequence[Any]) -> list[str]:
    """Return calls in a form in which those that are the same are equal: texts without case, the calls in order."""
    return sorted(json.dumps(call, sort_keys=True).lower() for call in calls)


def main(arguments: Sequence[str] | None = None) -> bool:
    parser = parser_of(name="calls", about=__doc__)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS], help="the kinds of requests [all]")
    options = parser.parse_args(arguments)
    told = tomllib.loads(REQUESTS.read_text("utf-8"))
    rows = [(kind, row) for kind in options.kinds for row in told[kind]]
    python = os.environ.get("OUTSIDE_PYTHON", ".venv-outside/bin/python")
    right = dict.fromkeys(options.kinds, 0)
    with tempfile.TemporaryDirectory() as folder:
        speech = read_aloud([row["say"] for _, row in rows], options.voice, Path(folder), silence=_SILENCE)
        with serving("--llm", options.llm, "--tts", options.tts) as (port, pid):
            url = f"ws://127.0.0.1:{port}/v1/realtime?model=omni"
            order = {"url": url, "instructions": told["instructions"], "tools": told["tool"], "speech": speech}
            before = cpu_seconds_of_all(pid)
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
            print(f"\nPSS of all processes: {proportional_gb(pid):.2f} GB")
            print(f"CPU time of a request: {(cpu_seconds_of_all(pid) - before) / len(rows):.1f} s")
    for kind, number in right.items():
        least = KINDS[kind]
        print(f"{kind}: {number} of {len(told[kind])} right{f', wanted {least}' if least else ''}")
    return all(number >= KINDS[kind] for kind, number in right.items())


if __name__ == "__main__":
    raise SystemExit(0 if main() else 1)
