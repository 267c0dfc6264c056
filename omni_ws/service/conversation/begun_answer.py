"""The rest of an answer that another server has begun, behind the part that the client has.

``restart_of`` finds the place at which a voice begins again. RestOfAnswer puts the new audio behind the audio that was
told: the same word is at the same place in both. What of it was told is dropped by its position, see AnswerWriter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from omni_ws.core.chunks import Word
from omni_ws.core.ledger_entry import LedgerEntry, ends_of_words
from omni_ws.engine.base import AudioOutput, EngineOutput, Finished, OutputFilter, OutputWriter, TranscriptOutput
from omni_ws.engine.clauses import ClauseSplitter

#: How far back the beginning of a sentence is looked for, in characters. A longer one is read again from the start.
_MOST_BACK: Final = 4096
_SENTENCE_MARKS: Final = frozenset(".!?…\n。！？")
_CLOSERS: Final = "\"'”’)]"
#: The audio that is held until the word is found that was spoken last, in bytes: about a minute and a half.
_MOST_HELD: Final = 4 << 20
#: Times of words are rounded: places in the audio that differ by less are the same.
_SAME_MS: Final = 2.0


@dataclass(frozen=True, slots=True)
class VoiceRestart:
    """The place at which a voice begins again: ``position`` in the text, about ``ms`` milliseconds in the audio.

    The client has ``told`` words behind it. ``word`` is the one that was spoken when the audio that it has ended, the
    ``number``-th behind the place, from 0; None if the voice tells no words, or had told none of those it had begun.
    """

    position: int = 0
    ms: float = 0
    told: int = 0
    word: Word | None = None
    number: int = 0


def restart_of(entry: LedgerEntry, *, from_start: bool) -> VoiceRestart:
    """Return where the voice of an answer begins again: at the sentence, or clause, in which the told audio ended.

    ``from_start``: the engine reads all of the answer again.
    """
    words, text = entry.words, entry.said.joined()
    last = sum(1 for word in words if word.start_ms < entry.made_ms) - 1
    if last < 0 or (from_start and entry.base_ms):
        clauses = [one for one in entry.clauses if one.start_ms < entry.made_ms]
        if from_start or not entry.made_ms:
            return VoiceRestart(told=len(words) if entry.made_ms else 0)
        if clauses:
            return VoiceRestart(clauses[-1].start, clauses[-1].start_ms)
        return VoiceRestart(entry.base_end, entry.base_ms, len(words))
    position, first = entry.base_end, 0
    if not from_start:
        ends = [end for end, _ in ends_of_words(text, words, begin=entry.base_end)]
        position = _sentence_start(
            text, entry.base_end, max(ends[last - 1] if last else entry.base_end, ends[last] - 1)
        )
        first = next((number for number, end in enumerate(ends[:last]) if end > position), last)
    ms = words[first - 1].end_ms if first else entry.base_ms
    return VoiceRestart(position, ms, len(words) - first, words[last], last - first)


def _sentence_start(text: str, begin: int, limit: int) -> int:
    """Return where the last sentence that ends at ``limit`` or before it ends in ``text``; ``begin`` if none does."""
    start = max(begin, limit - _MOST_BACK)
    found = begin
    for clause in ClauseSplitter().feed(text[start : limit + 2]):
        end = start + clause.end
        ended = clause.text.rstrip(_CLOSERS)[-1:] in _SENTENCE_MARKS or text[end : end + 1] == "\n"
        if ended and end <= limit:
            found = end
    return found


class RestOfAnswer(OutputFilter):
    """An OutputFilter for an answer that another server has begun, whose engine writes text behind that of the other.

    Transcripts and words that the client has are dropped, by their number. ``begin_at`` is called once, before the
    first audio, with the place in the answer at which it begins, in milliseconds; words get their places in the whole
    answer. Words may come with audio that the client has: AnswerWriter tells them with the next.
    """

    def __init__(
        self, out: OutputWriter, entry: LedgerEntry, restart: VoiceRestart, *, begin_at: Callable[[float], None]
    ) -> None:
        super().__init__(out)
        self._heard = len(entry.heard.pieces)
        self._made_ms = entry.made_ms
        self._restart = restart
        self._begin_at = begin_at
        #: Where the new audio begins; None until that is known. Audio waits until then.
        self._begin_ms: float | None = None
        self._held: list[AudioOutput] = []
        self._held_bytes = 0
        self._held_words: list[Word] = []
        #: The words still to come that the client has.
        self._told = restart.told

    def write(self, output: EngineOutput) -> None:
        match output:
            case TranscriptOutput(interim=interim) if self._heard:
                self._heard -= not interim
            case AudioOutput() if self._made_ms:
                self._take(output)
            case Finished():
                if self._held:
                    self._begin(self._restart.ms)
                self._out.write(output)
            case _:
                self._out.write(output)

    def _take(self, audio: AudioOutput) -> None:
        if self._begin_ms is not None:
            self._pass(audio, self._begin_ms)
            return
        self._held.append(audio)
        self._held_bytes += audio.samples.nbytes
        self._held_words += audio.words
        restart = self._restart
        if restart.word is not None and len(self._held_words) > restart.number:
            self._begin(restart.word.start_ms - self._held_words[restart.number].start_ms)
        elif restart.word is None or self._held_bytes > _MOST_HELD:
            self._begin(restart.ms)

    def _begin(self, begin_ms: float) -> None:
        if abs(begin_ms - self._restart.ms) <= _SAME_MS and not self._restart.position:
            begin_ms = self._restart.ms
        self._begin_ms = max(0.0, begin_ms)
        self._begin_at(self._begin_ms)
        held, self._held, self._held_words = self._held, [], []
        for audio in held:
            self._pass(audio, self._begin_ms)

    def _pass(self, audio: AudioOutput, begin_ms: float) -> None:
        words = tuple(
            Word(one.text, round(one.start_ms + begin_ms), round(one.end_ms + begin_ms), one.text_end)
            for one in audio.words[self._told :]
        )
        self._told -= min(self._told, len(audio.words))
        self._out.write(AudioOutput(audio.samples, audio.sample_rate, words, audio.text_end))
