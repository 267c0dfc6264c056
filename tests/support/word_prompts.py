"""Prompts over a tokenizer of words and a template that is easy to read, without vLLM."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omni_ws.core.chunks import Modality
from omni_ws.engine.vllm.prompt import PromptForm

CONTROL = ["<|end|>", "<|sound|>", "<|picture|>", "<|eos|>"]


@dataclass(frozen=True)
class Added:
    content: str
    special: bool = True

    def __str__(self) -> str:
        return self.content


class WordTokenizer:
    """Control tokens are one token each; so is a word with the space before it, unless it is cut from that."""

    all_special_tokens = ("<|eos|>",)

    def __init__(self, *, divisible: bool = True) -> None:
        self.added_tokens_decoder = {number: Added(token) for number, token in enumerate(CONTROL)}
        self._words: dict[str, int] = {token: number for number, token in enumerate(CONTROL)}
        control = "|".join(map(re.escape, CONTROL))
        # One that marks the beginning of every text, as some do, gives other tokens for a text in two pieces.
        self._begin = "" if divisible else "▁"
        words = r" ?[^\s<]+|\s+(?!\S)|\s+|<"
        self._pieces, self._words_alone = re.compile(f"{control}|{words}"), re.compile(words)

    def encode(self, text: str, *, add_special_tokens: bool = True, split_special_tokens: bool = False) -> list[int]:
        pieces = self._words_alone if split_special_tokens else self._pieces
        return [self._number(word) for word in pieces.findall(self._begin + text)]

    def _number(self, word: str) -> int:
        return self._words.setdefault(word, len(self._words))

    def decode(self, tokens: list[int]) -> str:
        words = list(self._words)
        return "".join(words[token] for token in tokens)


def render(messages: list[dict[str, Any]], tools: list[dict[str, Any]], arguments: Mapping[str, Any]) -> str:
    said = "".join(f"<|end|>{message['role']}\n{written(message)}" for message in messages)
    goes_on = messages[-1]["role"] == "assistant"
    return f"{tools or ''}{said}" + ("" if goes_on else "<|end|>assistant\n")


def written(message: dict[str, Any]) -> str:
    calls = "".join(f"[{call['id']} {call['function']['arguments']}]" for call in message.get("tool_calls", ()))
    return f"{message['content']}{calls}{message.get('tool_call_id', '')}"


def placeholder(modality: Modality, number: int) -> str:
    return f"Sound {number}: <|sound|>" if modality is Modality.AUDIO else "<|picture|>"


def form(tokenizer: WordTokenizer | None = None) -> PromptForm:
    return PromptForm(tokenizer or WordTokenizer(), render, placeholder, frozenset({Modality.AUDIO, Modality.IMAGE}))
