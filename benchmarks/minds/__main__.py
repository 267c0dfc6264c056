"""``python -m benchmarks.minds [URL] [--llm MIND]``: asks a mind all sentences, and prints what it answers.

Each sentence is a conversation of its own. It asks a server that it starts with ``--llm``, or the one at the URL, whose
``--llm`` has to be named: a mind gets the instructions that it has for spoken answers, but for rules, which take none.
"""

from __future__ import annotations

import argparse
import json
import time
import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from urllib.request import Request, urlopen

from benchmarks.minds.spoken import serving
from omni_ws.config.parts import LlmConfig

_ROLES = ("user", "assistant")
SENTENCES = Path(__file__).with_name("sentences.toml")
#: Instructions that fit the first sentences alone fail with these.
FURTHER = Path(__file__).with_name("further.toml")


def ask(url: str, instructions: str = "") -> None:
    """Ask the server whose OpenAI routes begin at ``url``."""
    told = [("system", instructions)] if instructions else []
    tables = [(file.stem, tomllib.loads(file.read_text("utf-8"))) for file in (SENTENCES, FURTHER)]
    for name, kind, asked in ((name, kind, asked) for name, table in tables for kind, asked in table.items()):
        print(f"\n{name}, {kind}: {len(asked)}")
        for number, row in enumerate(asked, 1):
            before = ((role, text) for pair in row.get("before", ()) for role, text in zip(_ROLES, pair, strict=True))
            said = [*before, ("user", row["say"])]
            began = time.perf_counter()
            answer = _answer(url, [{"role": role, "content": text} for role, text in (*told, *said)])
            print(f"{number:>3} {' / '.join(text for _, text in said)}\n    wanted: {row['wants']}")
            print(f"    answer: {answer} ({time.perf_counter() - began:.2f} s)", flush=True)


def _answer(url: str, messages: list[dict[str, str]]) -> str:
    body = json.dumps({"model": _model(url), "messages": messages, "modalities": ["text"]}).encode()
    headers = {"Content-Type": "application/json"}
    with urlopen(Request(f"{url}/chat/completions", body, headers)) as response:
        return str(json.load(response)["choices"][0]["message"]["content"])


@cache
def _model(url: str) -> str:
    with urlopen(f"{url}/models") as response:
        return str(json.load(response)["data"][0]["id"])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.minds", description=__doc__)
    parser.add_argument("url", nargs="?", help="a server that runs, such as http://127.0.0.1:8080/v1")
    parser.add_argument(
        "--llm", help="with a URL: the mind that this server has; without: the mind to start a server with [rules]"
    )
    options = parser.parse_args(arguments)
    if options.url is not None and options.llm is None:
        parser.error("name the mind of the server with --llm: it gets the instructions of that mind")
    llm = options.llm or "rules"
    instructions = "" if llm == "rules" else LlmConfig(use=llm).spoken_instructions
    if options.url is not None:
        ask(options.url, instructions)
        return
    with serving("--llm", llm, "--asr", "none", "--tts", "espeak") as (port, _):
        ask(f"http://127.0.0.1:{port}/v1", instructions)


if __name__ == "__main__":
    main()
