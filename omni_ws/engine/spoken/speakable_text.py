"""SpeakableText: turns what a model writes into what a voice should read, while it is being written."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from omni_ws.engine.spoken import english
from omni_ws.engine.spoken.inline_markup import InlineMarkup
from omni_ws.engine.spoken.table import MAX_ROW, SpokenTable, TableWord

#: How much text is made speakable, in characters, before other tasks run: at 20 µs for each of a number.
AT_A_STRETCH: Final = 256
#: A longer word is cut; addresses are the longest that people write.
MAX_WORD: Final = 2048
#: Words that are read together at most: "March 15, 2024" is three.
MAX_GROUP_WORDS: Final = 10
MAX_GROUP_CHARACTERS: Final = 200
#: Words before a group that may tell how it is read, and the length of a word that tells nothing.
_REMEMBERED: Final = 3
_MAX_REMEMBERED: Final = 30
#: A longer word, without its markup, stays as it is: nobody would follow it, and reading it would take long.
_MAX_READ_WORD: Final = 600
#: From this length on, in characters, a line of code cannot be the end of a block.
_MAX_FENCE: Final = 200

#: Scripts without white space between words: a word ends after each of their letters.
_UNSPACED: Final = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3000-\u30ff\u3400-\u9fff\uf900-\ufaff\uff00-\uffef"
_WORD_END: Final = re.compile(rf"[\s]|[{_UNSPACED}]")
_SPACES: Final = re.compile(r"[^\S\n]+")

_FENCE: Final = re.compile(r"(`{3,}|~{3,})([^`]*)")
_HEADING: Final = re.compile(r"#{1,6}")
_BULLETS: Final = frozenset("-*+•‣◦▪▸►–·")
_ITEM_NUMBER: Final = re.compile(r"(\d{1,3})[.)]")
_RULE: Final = re.compile(r"([-*_=])\1{2,}")
_REFERENCE_MARK: Final = re.compile(r"\[[^\]]{1,80}\]:")
_PAUSES: Final = ".!?…:;,—。！？：；，、"
_MARKS: Final = _PAUSES + "()[]\"'“”‘’"
_CLOSERS: Final = "\"'”’)]»"

#: Blocks of these languages are text.
_TEXTS: Final = frozenset(("text", "txt", "plaintext", "plain", "markdown", "md"))
_LANGUAGES: Final = {
    **dict.fromkeys(("py", "python", "python3"), "Python"),
    **dict.fromkeys(("js", "javascript", "jsx"), "JavaScript"),
    **dict.fromkeys(("ts", "typescript", "tsx"), "TypeScript"),
    **dict.fromkeys(("sh", "bash", "shell", "zsh", "console"), "Shell"),
    **dict.fromkeys(("c++", "cpp"), "C plus plus"),
    **dict.fromkeys(("c#", "csharp", "cs"), "C sharp"),
    **{
        name.lower(): name
        for name in ("Java", "Rust", "Ruby", "Go", "Kotlin", "Swift", "Lua", "HTML", "CSS", "JSON", "SQL", "C")
    },
}


class Spoken(NamedTuple):
    """A piece of what is read: ``text`` stands for the written text from ``start`` to ``end``, in characters.

    ``written`` is that without its markup: "$20" for "twenty dollars". What is said and not written has a place alone,
    ``start == end``, and no ``written``. Neither have spaces and pauses.
    """

    text: str
    start: int
    end: int
    written: str = ""


class _Word(NamedTuple):
    text: str
    start: int
    end: int
    #: Whether white space precedes it.
    gap: bool = False


class SpeakableText:
    """Turns text into its spoken form, piece by piece: markup, links, emoji and code go, and in English numbers, dates,
    units, abbreviations and signs are read in words.

    Of another ``language`` (RFC 5646) only what does not depend on it is changed. A ``literal`` text is no markup, and
    nothing of it is left out: its numbers, dates and units are read in words, and that is all. The result does not
    depend on how the text is cut into pieces. Time is linear in the length of the text, and memory is bounded: at most
    a word, a row of a table, or a few words that are read together, are held back until what follows is known. ``rest``
    returns them.
    """

    def __init__(self, language: str = "en", *, literal: bool = False) -> None:
        self._english = language.partition("-")[0].lower() == "en"
        self._literal = literal
        self._markup = InlineMarkup(picture="picture" if self._english else "")
        self._table = SpokenTable(english=self._english)
        self._spoken: list[Spoken] = []
        #: Text that is not read yet; its place in the whole; the length of it that is known to have no end of a unit.
        self._raw = ""
        self._offset = 0
        self._known = 0
        #: Words that wait for the next one, and the last words before them, up to three.
        self._group: list[_Word] = []
        self._before = ""
        #: Whether a space is due before the next word; the last character that was said.
        self._gap = False
        self._last = "\n"
        self._at_line_start = True
        #: Whether the line is a row of a table.
        self._in_row = False
        #: Whether the line is a heading or an item of a list, which ends like a sentence.
        self._ends_like_sentence = False
        #: The number of an item, until something follows it in its line.
        self._item: _Word | None = None
        #: The marks that end the block of code, or of text; "" outside. Whether the rest of a line is passed over.
        self._fence = ""
        self._text_fence = ""
        self._skipping_line = False

    def feed(self, text: str) -> list[Spoken]:
        """Return what ``text`` completes."""
        for start in range(0, len(text), MAX_WORD):
            self._raw += text[start : start + MAX_WORD]
            self._read(final=False)
        return self._take()

    @property
    def looks_complete(self) -> bool:
        """Whether what is held back looks like the end of a sentence."""
        held = self._raw.rstrip(_CLOSERS + "*_` ") or (self._group[-1].text if self._group else "")
        return not self._fence and held.endswith((".", "!", "?", "…"))

    def rest(self) -> list[Spoken]:
        """Return what is held back, as if the text ended. Text that comes later goes on in the same line."""
        self._read(final=True)
        self._flush_item(alone=True)
        self._flush()
        self._say_table(self._table.end())
        return self._take()

    def _take(self) -> list[Spoken]:
        spoken, self._spoken = self._spoken, []
        return spoken

    # The text in lines and words.

    def _read(self, *, final: bool) -> None:
        raw, at = self._raw, 0
        while at < len(raw) and (end := self._read_unit(raw, at, final=final)) is not None:
            at = end
            self._known = 0
        self._raw = raw[at:]
        self._offset += at

    def _read_unit(self, raw: str, at: int, *, final: bool) -> int | None:
        """Read one unit of ``raw`` at ``at`` and return where it ends; None while that is not known."""
        if self._skipping_line:
            end = raw.find("\n", at)
            self._skipping_line = end < 0
            return len(raw) if end < 0 else end
        if raw[at] == "\n":
            self._end_line(self._offset + at)
            return at + 1
        if self._fence and self._at_line_start:
            return self._read_code_line(raw, at, final=final)
        if spaces := _SPACES.match(raw, at):
            if not self._at_line_start:
                self._space(self._offset + at)
            return spaces.end()
        if self._at_line_start and raw[at] == "|" and not self._literal:
            end = raw.find("\n", at + self._known)
            whole = final or end >= 0
            if not whole and len(raw) - at <= MAX_ROW:
                self._known = len(raw) - at
                return None
            end = end if end >= 0 else len(raw)
            self._known = 0
            if end - at <= MAX_ROW:
                self._at_line_start, self._in_row = False, True
                self._say_table(self._table.feed(raw[at:end], self._offset + at))
                return end
        return self._read_word(raw, at, final=final)

    def _read_word(self, raw: str, at: int, *, final: bool) -> int | None:
        found = _WORD_END.search(raw, at + self._known, at + MAX_WORD)
        if found is not None:
            end = found.start() if found[0].isspace() else found.end()
        elif final or len(raw) - at >= MAX_WORD:
            end = min(len(raw), at + MAX_WORD)
        else:
            self._known = len(raw) - at
            return None
        self._word(raw[at:end], self._offset + at)
        return end

    def _read_code_line(self, raw: str, at: int, *, final: bool) -> int | None:
        end = raw.find("\n", at)
        if end < 0 and len(raw) - at < _MAX_FENCE and not final:
            return None
        line = raw[at : end if end >= 0 else at + _MAX_FENCE].strip()
        if line.startswith(self._fence) and not line.strip(self._fence[0]):
            self._fence = ""
        self._skipping_line = end < 0
        return len(raw) if end < 0 else end + 1

    def _end_line(self, at: int) -> None:
        self._flush_item(alone=True)
        self._flush()
        self._gap = False
        if self._ends_like_sentence and self._last not in _PAUSES and not self._last.isspace():
            self._say(".", at, at)
        if self._last != "\n":
            self._say("\n", at, at + 1)
        self._markup.end_line()
        if self._at_line_start:
            self._say_table(self._table.end())
        self._at_line_start = True
        self._in_row = self._ends_like_sentence = False
        self._before = ""

    def _space(self, at: int) -> None:
        """White space within a line. At a pause it is passed on at once: what follows may be long in coming."""
        if not self._group and self._last in _PAUSES + _CLOSERS and not self._gap:
            self._say(" ", at, at + 1)
        else:
            self._gap = True

    # Blocks.

    def _begins_block(self, word: str, start: int) -> bool:
        """Whether a word at the start of a line is markup of a block, and no text."""
        if (fence := _FENCE.fullmatch(word)) is not None:
            self._open_fence(fence[1], fence[2].lower(), start)
        elif _HEADING.fullmatch(word):
            self._ends_like_sentence = True
            self._at_line_start = False
        elif word in _BULLETS:
            self._ends_like_sentence = True
        elif _RULE.fullmatch(word):
            pass
        elif _REFERENCE_MARK.fullmatch(word):
            self._at_line_start = False
        elif _ITEM_NUMBER.fullmatch(word):
            self._item = _Word(word, start, start + len(word))
            self._ends_like_sentence = True
            self._at_line_start = False
        elif word in ("[x]", "[X]") and self._ends_like_sentence:
            self._at_line_start = False
            self._inline("done:" if self._english else "", start, start + len(word))
        else:
            return False
        return True

    def _open_fence(self, marks: str, language: str, start: int) -> None:
        """Begin a block of code. Reading it aloud helps nobody: that there is one is said, and that it is left out."""
        self._skipping_line = True
        if self._text_fence and marks.startswith(self._text_fence):
            self._text_fence = ""
        elif language in _TEXTS:
            self._text_fence = marks
        else:
            self._fence = marks
            if self._english:
                name = _LANGUAGES.get(language, "")
                self._say(f"{name} code left out." if name else "Code left out.", start, start)

    def _flush_item(self, *, alone: bool) -> None:
        """Say the number of an item: "one, " before its text. A line with nothing else is a number of its own."""
        if self._item is None:
            return
        (number, start, end, _), self._item = self._item, None
        if self._english and not alone:
            self._say(f"{english.in_words(number[:-1], '')}, ", start, end, number)
        else:
            self._inline(number, start, end)
            self._flush()
            self._gap = True

    def _say_table(self, words: list[TableWord]) -> None:
        for text, start, end in words:
            if start == end and not text[0].isalnum():
                self._flush()
                self._gap = False
                self._say(text, start, end)
                self._before = ""
            else:
                self._inline(text, start, end)
            self._gap = True
        if words:
            self._gap = False
            self._markup.end_line()

    # Words.

    def _word(self, word: str, start: int) -> None:
        end = start + len(word)
        if self._at_line_start and not self._literal:
            self._say_table(self._table.end())
            word = word.lstrip(">")
            if not word or self._begins_block(word, start):
                return
        self._at_line_start = False
        self._flush_item(alone=False)
        self._inline(word, start, end)

    def _inline(self, word: str, start: int, end: int) -> None:
        """Say a word of a line without its markup, once it is known how it is read."""
        cleaned = word if self._literal else self._markup.clean(word)
        if cleaned == "**" and not self._english:
            return
        as_written = not self._english or len(cleaned) > _MAX_READ_WORD
        for text in cleaned.split():
            gap, self._gap = self._gap, False
            if text == "|" and not self._literal:
                self._flush()
                self._say(",", end, end)
            elif as_written or len(text) > MAX_GROUP_CHARACTERS:
                self._flush()
                self._say_word(text, start, end, gap=gap)
            else:
                if not gap:
                    self._flush()
                self._add(_Word(text, start, end, gap))
            self._gap = True
        self._gap = False

    def _add(self, word: _Word) -> None:
        group = self._group
        before = group[-1].text if group else self._before
        waits = english.waits(word.text, before)
        if not group and not waits and english.is_read_as_written(word.text, before):
            self._say_word(*word[:3], gap=word.gap)
            self._remember(word.text)
            return
        group.append(word)
        too_long = len(group) >= MAX_GROUP_WORDS or word.end - group[0].start > MAX_GROUP_CHARACTERS
        if too_long or not waits:
            self._flush()

    def _flush(self) -> None:
        """Say the words that waited. Those at their ends that are read as they are written keep their own places."""
        group, self._group = self._group, []
        if not group:
            return
        written = [word.text for word in group]
        spoken = english.in_words(" ".join(written), self._before).split()
        for text in written[-_REMEMBERED:]:
            self._remember(text)
        head = tail = 0
        while head < min(len(written), len(spoken)) and written[head] == spoken[head]:
            head += 1
        while tail < min(len(written), len(spoken)) - head and written[-1 - tail] == spoken[-1 - tail]:
            tail += 1
        for word in group[:head]:
            self._say_word(word.text, word.start, word.end, gap=word.gap)
        if middle := " ".join(spoken[head : len(spoken) - tail]):
            replaced = group[head : len(group) - tail] or group[-1:]
            first, last = replaced[0], replaced[-1]
            names = " ".join(word.text for word in replaced)
            self._say_word(middle, first.start, last.end, gap=first.gap, written=names)
        for word in group[len(group) - tail :]:
            self._say_word(word.text, word.start, word.end, gap=word.gap)

    def _remember(self, word: str) -> None:
        """Keep what stands before the next words: nothing of a sentence that has ended."""
        before = self._before.split(" ")[1 - _REMEMBERED :] if self._before and len(word) < _MAX_REMEMBERED else []
        self._before = "" if word.endswith((".", "!", "?")) else " ".join([*before, word.strip(_MARKS)]).strip()

    def _say_word(self, text: str, start: int, end: int, *, gap: bool, written: str = "") -> None:
        written = (written or text) if end > start else ""
        if gap and not self._last.isspace() and text[0] not in ",.;:!?":
            text = f" {text}"
        self._say(text, start, end, written)

    def _say(self, text: str, start: int, end: int, written: str = "") -> None:
        self._spoken.append(Spoken(text, start, end, written))
        self._last = text[-1]


def spoken_form(text: str, language: str = "en") -> list[Spoken]:
    """Return the spoken form of a complete text."""
    speakable = SpeakableText(language)
    return [*speakable.feed(text), *speakable.rest()]
