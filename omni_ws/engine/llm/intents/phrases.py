"""Phrases: sentences with alternatives, written as one: "(hi|hello) [there]" is four sentences."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product
from typing import Final

_TOKEN: Final = re.compile(r"[()\[\]|]|[^()\[\]|]+")


def expanded(phrase: str) -> list[str]:
    """Every sentence that ``phrase`` stands for, with single spaces. Brackets may stand in brackets."""
    tokens = iter((*_TOKEN.findall(phrase), ""))
    return list(dict.fromkeys(" ".join(sentence.split()) for sentence in _alternatives(tokens, "")))


def _alternatives(tokens: Iterator[str], closing: str) -> list[str]:
    """The sentences up to the bracket ``closing``."""
    found: list[str] = []
    parts: list[list[str]] = []
    for token in tokens:
        if token in ("|", closing):
            found += ("".join(choice) for choice in product(*parts))
            parts = []
            if token == closing:
                return found
        elif token == "(":
            parts.append(_alternatives(tokens, ")"))
        elif token == "[":
            parts.append(["", *_alternatives(tokens, "]")])
        elif token in (")", "]", ""):
            break
        else:
            parts.append([token])
    raise ValueError(f"a phrase has a bracket too many or too few, which should be {closing!r}")


class Key:
    """Runs of words that stand in a sentence one behind the other, with any words between them."""

    def __init__(self, sentence: str) -> None:
        self._runs = tuple(f" {run.strip()} " for run in sentence.split("*") if run.strip())
        self.first_word = self._runs[0].split()[0]
        #: How much it tells: its letters.
        self.weight = sum(map(len, self._runs))

    def stands_in(self, words: str) -> bool:
        """Whether it is in ``words``, which have a space at both ends."""
        position = 0
        for run in self._runs:
            position = words.find(run, position)
            if position < 0:
                return False
            position += len(run) - 1
        return True
