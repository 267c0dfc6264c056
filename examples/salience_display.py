"""Displays of the salience client: one line per token, with the strength of each concept in colour."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from omni_ws.generated import salience_pb2 as messages

#: Z-score of the strongest colour.
FULL = 2.5
#: Readouts at the beginning, whose spread is unknown, are shown as average.
LEAST_TOKENS = 3
#: Position of the attention sink. Its residual stream is many times larger than any other, so its readout is
#: meaningless, and would level out all others.
SINK = 0


class Vocabulary(Protocol):
    """Converts text to token ids, and token ids to printable text."""

    def encode(self, text: str) -> list[int]: ...

    def show(self, token: int) -> str: ...


class _Ids:
    def encode(self, text: str) -> list[int]:
        raise ValueError("text needs a --tokenizer; --prompt-ids does not")

    def show(self, token: int) -> str:
        return str(token)


class _Bytes:
    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def show(self, token: int) -> str:
        return json.dumps(chr(token))[1:-1] if token < 128 else f"<{token}>"


class _Tokenizer:
    """A tokenizer of ``transformers``."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text).input_ids)

    def show(self, token: int) -> str:
        return json.dumps(self._tokenizer.decode([token]), ensure_ascii=False)[1:-1]


class _FastTokenizer:
    """A tokenizer of ``tokenizers``, a much smaller package."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    def show(self, token: int) -> str:
        return json.dumps(self._tokenizer.decode([token], skip_special_tokens=False), ensure_ascii=False)[1:-1]


def load_vocabulary(name: str | None) -> Vocabulary:
    """Loads a tokenizer: ``name`` is a folder, ``bytes``, or None for bare ids.

    Raises OSError, ValueError or ImportError.
    """
    if name is None:
        return _Ids()
    if name == "bytes":
        return _Bytes()
    if not Path(name).is_dir():
        raise ValueError(f"{name} is no folder with a tokenizer")
    try:
        from transformers import AutoTokenizer

        return _Tokenizer(AutoTokenizer.from_pretrained(name))
    except ImportError:
        from tokenizers import Tokenizer

        return _FastTokenizer(Tokenizer.from_file(str(Path(name) / "tokenizer.json")))


class Spread:
    """Running mean and deviation (Welford), since raw readouts grow with the residual stream."""

    def __init__(self) -> None:
        self._count = 0
        self._mean = 0.0
        self._squares = 0.0

    def z(self, value: float) -> float:
        """Returns the z-score of ``value`` among its predecessors, and adds it to them."""
        deviation = math.sqrt(self._squares / (self._count - 1)) if self._count >= LEAST_TOKENS else 0.0
        z = (value - self._mean) / deviation if deviation else 0.0
        self._count += 1
        change = value - self._mean
        self._mean += change / self._count
        self._squares += change * (value - self._mean)
        return z


class Trace:
    """Plain display. A line has position, text, log-probability, and the concepts of one layer."""

    def __init__(self, vocabulary: Vocabulary, concepts: Sequence[str], place: int) -> None:
        self._vocabulary = vocabulary
        self._concepts = tuple(concepts)
        self._from = place * len(self._concepts)
        self._spreads = [Spread() for _ in self._concepts]
        self._heading_is_due = True

    def token(self, token: messages.Token) -> None:
        if self._heading_is_due and self._concepts:
            self._heading_is_due = False
            self._line(f"{'':38}", [(f"{name[:8]:>8}", 0.0) for name in self._concepts])
        text = self._vocabulary.show(token.id)
        logprob = f"{token.sampled_logprob:8.2f}" if token.has_sampled_logprob else f"{'':8}"
        mark = " " if token.is_prefill else ">"
        values = token.readout[self._from : self._from + len(self._concepts)]
        if token.position == SINK:
            cells = [(f"{'-':>8}", 0.0) for _ in values]
        else:
            scores = [spread.z(value) for spread, value in zip(self._spreads, values, strict=False)]
            cells = [(f"{z:+8.1f}", z) for z in scores]
        self._line(f"{token.position:7} {mark} {text[:18]:18} {logprob} ", cells)

    def _line(self, head: str, cells: Sequence[tuple[str, float]]) -> None:
        print(head + " ".join(text for text, _ in cells))


class ColouredTrace(Trace):
    """Coloured display: red for more of a concept than before, blue for less."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        from rich.console import Console

        self._console = Console(highlight=False)

    def _line(self, head: str, cells: Sequence[tuple[str, float]]) -> None:
        from rich.text import Text

        line = Text(head)
        for text, z in cells:
            line.append(text + " ", style=_style(z))
        self._console.print(line, soft_wrap=True)


def _style(z: float) -> str:
    strength = round(min(abs(z) / FULL, 1.0) * 200)
    if strength < 20:
        return "default"
    return f"white on rgb({strength},0,0)" if z > 0 else f"white on rgb(0,0,{strength})"


def make_trace(
    vocabulary: Vocabulary, concepts: Sequence[str], layers: Sequence[int], *, layer: int | None = None
) -> Trace:
    """Creates a display, coloured with ``rich`` on a terminal. Raises ValueError for a layer without readouts."""
    if layer is not None and layer not in layers:
        raise ValueError(f"layer {layer} is not read out; {', '.join(map(str, layers)) or 'none'} is")
    place = list(layers).index(layer) if layer is not None else len(layers) - 1
    if sys.stdout.isatty():
        try:
            return ColouredTrace(vocabulary, concepts, place)
        except ImportError:
            pass
    return Trace(vocabulary, concepts, place)
