"""SpeakableText: a converter of a model's text to its spoken form, which a voice reads, while the text is written.

WrittenWords does the reverse: it finds the written word for which a spoken word stands.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import groupby
from operator import itemgetter
from typing import Final, NamedTuple

from omni_ws.core.chunks import Word
from omni_ws.core.json_values import primary_subtag
from omni_ws.engine.spoken.english import EnglishRules
from omni_ws.engine.spoken.languages import (
    UNSPACED,
    LanguageRules,
    LexiconReader,
    Reading,
    TextWord,
    lexicon_of,
    rules_of,
    table_of,
)

#: How many characters are converted before other tasks run. A digit takes up to 20 µs.
AT_A_STRETCH: Final = 256
#: A longer word is cut; addresses are the longest that people write.
MAX_WORD: Final = 2048
#: The maximum number of words that are read together: "March 15, 2024" is three.
MAX_GROUP_WORDS: Final = 10
MAX_GROUP_CHARACTERS: Final = 200
#: How many words before a group may decide how it is read, and the length from which a word is ignored for this.
_REMEMBERED: Final = 3
_MAX_REMEMBERED: Final = 30
#: A longer word, without its markup, is not converted: no listener could follow it, and conversion would take long.
_MAX_READ_WORD: Final = 600
#: From this length on, in characters, a line of code cannot be the end of a block.
_MAX_FENCE: Final = 200

_WORD_END: Final = re.compile(rf"[\s]|[{UNSPACED}]")
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

#: Fenced blocks of these languages are read as text.
_TEXTS: Final = frozenset(("text", "txt", "plaintext", "plain", "markdown", "md"))


class Spoken(NamedTuple):
    """A piece of the spoken form: ``text`` is read in place of the written text from ``start`` to ``end``.

    ``written`` is this written text without its markup: "$20" for "twenty dollars". It is "" for spaces and pauses, and
    for words that are not in the written text; such words only have a position, ``start == end``. Positions are in
    characters.
    """

    text: str
    start: int
    end: int
    written: str = ""


class SpeakableText:
    """A converter of text to its spoken form, piece by piece.

    Markup, links, emoji and code are removed, and numbers, dates, units, abbreviations and signs are put into words, in
    English and the LANGUAGES of ``languages``. In another ``language`` (RFC 5646), or where that is not known (""),
    only the language-independent changes are made. A ``literal`` text has no markup, and nothing is removed from it;
    numbers, dates and units are put into words. Words in the ``lexicon`` are replaced as it says, in any language. The
    result does not depend on how the text is cut into pieces. Time is linear in the length of the text, and memory is
    bounded: at most a word, a row of a table, or a few words that are read together, are held back until the following
    text is known. ``rest`` returns the text held back.
    """

    def __init__(
        self, language: str = "en", *, literal: bool = False, lexicon: Mapping[str, str] | None = None
    ) -> None:
        self._rules = EnglishRules() if primary_subtag(language) == "en" else rules_of(language)
        self._phrases: Mapping[str, str] = {} if self._rules is None else self._rules.phrases
        self._literal = literal
        self._lexicon = LexiconReader(lexicon_of(lexicon)) if lexicon else None
        self._markup = InlineMarkup(picture=self._phrases.get("picture", ""))
        self._table = SpokenTable(self._phrases)
        self._spoken: list[Spoken] = []
        #: Text that is not converted yet; its position in the whole text; the length of its part without the end of a
        #: unit.
        self._raw = ""
        self._offset = 0
        self._known = 0
        #: Words that wait for the next word, and up to three words before them.
        self._group: list[TextWord] = []
        self._before = ""
        #: Whether a space is due before the next word; the last character of the spoken form.
        self._gap = False
        self._last = "\n"
        self._at_line_start = True
        #: Whether the line is a heading or an item of a list, which ends like a sentence.
        self._ends_like_sentence = False
        #: The number of a list item, until other text follows it in its line.
        self._item: TextWord | None = None
        #: The marks that end the current fenced block; "" outside one. Whether the rest of the line is skipped.
        self._fence = ""
        self._text_fence = ""
        self._skipping_line = False

    def feed(self, text: str) -> list[Spoken]:
        """Add ``text``, and return the spoken form of the text that is complete now."""
        for start in range(0, len(text), MAX_WORD):
            self._raw += text[start : start + MAX_WORD]
            self._read(final=False)
        return self._take()

    @property
    def looks_complete(self) -> bool:
        """Whether the text that is held back looks like the end of a sentence."""
        held = self._raw.rstrip(_CLOSERS + "*_` ")
        held = held or self._held_word or (self._group[-1].text if self._group else "")
        return not self._fence and held.endswith((".", "!", "?", "…"))

    def rest(self) -> list[Spoken]:
        """Return the spoken form of the text held back, as if the text ended. Further text continues the same line."""
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
        """Process the unit of ``raw`` (such as a word) at index ``at``; return its end, None while it is not known."""
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
                self._at_line_start = False
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
        self._ends_like_sentence = False
        self._before = ""

    def _space(self, at: int) -> None:
        """Process white space within a line. After punctuation it is output immediately: further text may take long."""
        holds = self._group or self._held_word
        if not holds and self._last in _PAUSES + _CLOSERS and not self._gap:
            self._say(" ", at, at + 1)
        else:
            self._gap = True

    # Blocks.

    def _begins_block(self, word: str, start: int) -> bool:
        """Process a word at the start of a line if it is the markup of a block; return whether it is."""
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
            self._item = TextWord(word, start, start + len(word))
            self._ends_like_sentence = True
            self._at_line_start = False
        elif word in ("[x]", "[X]") and self._ends_like_sentence:
            self._at_line_start = False
            self._inline(self._phrases.get("done", ""), start, start + len(word))
        else:
            return False
        return True

    def _open_fence(self, marks: str, language: str, start: int) -> None:
        """Begin a block of code: it is not read, and a sentence in its place says that there is code."""
        self._skipping_line = True
        if self._text_fence and marks.startswith(self._text_fence):
            self._text_fence = ""
        elif language in _TEXTS:
            self._text_fence = marks
        else:
            self._fence = marks
            if self._phrases:
                name = table_of("markup")["code"].get(language, "")
                self._say(self._phrases["code_of"].format(name) if name else self._phrases["code"], start, start)

    def _flush_item(self, *, alone: bool) -> None:
        """Output the number of a list item: as "one, " before the item's text, as a plain number if it is ``alone``."""
        if self._item is None:
            return
        (number, start, end, _), self._item = self._item, None
        if self._rules is not None and not alone:
            self._say(f"{self._rules.in_words(number[:-1], '')}, ", start, end, number)
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
        if self._item is not None and isinstance(self._rules, LanguageRules) and self._rules.is_month(word):
            (number, *place, _), self._item = self._item, None  # "15. März" is a date, and no item of a list
            self._inline(number, *place)
            self._gap = True
        self._flush_item(alone=False)
        self._inline(word, start, end)

    def _inline(self, word: str, start: int, end: int) -> None:
        """Process a word of a line: remove its markup, and output it as soon as its spoken form is known."""
        cleaned = word if self._literal else self._markup.clean(word)
        if cleaned == "**" and self._rules is None:
            return
        as_written = self._rules is None or len(cleaned) > _MAX_READ_WORD
        for text in cleaned.split():
            gap, self._gap = self._gap, False
            if text == "|" and not self._literal:
                self._flush()
                self._say(",", end, end)
            elif self._lexicon is not None and len(cleaned) <= _MAX_READ_WORD:
                self._say_readings(self._lexicon.feed(TextWord(text, start, end, gap)))
            elif as_written or len(text) > MAX_GROUP_CHARACTERS:
                self._flush()
                self._say_word(text, start, end, gap=gap)
            else:
                self._add(TextWord(text, start, end, gap))
            self._gap = True
        self._gap = False

    @property
    def _held_word(self) -> str:
        """The last word that is held back as a possible part of an entry of the lexicon; "" if there is none."""
        return "" if self._lexicon is None else self._lexicon.held

    def _say_readings(self, readings: Iterable[Reading]) -> None:
        """Output words as the lexicon says; words that are not in the lexicon are processed as without one."""
        for word, said in readings:
            if said:
                self._flush_group()
                text = self._joined(said)
                beside = self._last + text[0]  # of two entries in a script without spaces
                apart = beside.isalnum() and _WORD_END.search(beside) is None
                self._say_word(text, word.start, word.end, gap=word.gap or apart, written=word.text)
                self._remember(word.text)
            elif self._rules is not None and len(word.text) <= MAX_GROUP_CHARACTERS:
                self._add(word)
            else:
                self._flush_group()
                self._say_word(word.text, word.start, word.end, gap=word.gap)

    def _joined(self, said: Iterable[tuple[str, bool]]) -> str:
        """Return the parts of a Reading joined to a text, such as "engine x two" for "nginx-2"."""
        joined = ""
        for by_entry, parts in groupby(said, itemgetter(1)):
            text = (" " if by_entry else "").join(part for part, _ in parts)
            if not by_entry:
                if joined and text[0] == "-" and text[1:2].isalnum():
                    text = text[1:]
                if self._rules is not None and any(map(str.isdecimal, text)):
                    text = self._rules.in_words(text, "")
            joined += f" {text}" if joined[-1:].isalnum() and text[:1].isalnum() else text
        return joined

    def _add(self, word: TextWord) -> None:
        if not word.gap:
            self._flush_group()
        group, rules = self._group, self._rules
        assert rules is not None
        before = group[-1].text if group else self._before
        waits = rules.waits(word.text, before)
        if not group and not waits and rules.is_read_as_written(word.text, before):
            self._say_word(*word[:3], gap=word.gap)
            self._remember(word.text)
            return
        group.append(word)
        too_long = len(group) >= MAX_GROUP_WORDS or word.end - group[0].start > MAX_GROUP_CHARACTERS
        if too_long or not waits:
            self._flush_group()

    def _flush(self) -> None:
        """Output all words that are held back."""
        if self._lexicon is not None:
            self._say_readings(self._lexicon.rest())
        self._flush_group()

    def _flush_group(self) -> None:
        """Output the words of ``_group``, which are put into words together.

        Words at the two ends of the group that stay as written keep their own positions.
        """
        group, self._group = self._group, []
        if not group or self._rules is None:
            return
        written = [word.text for word in group]
        spoken = self._rules.in_words(" ".join(written), self._before).split()
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
        """Keep ``word`` as context for the next words; the end of a sentence clears the context."""
        before = self._before.split(" ")[1 - _REMEMBERED :] if self._before and len(word) < _MAX_REMEMBERED else []
        bare = word.strip(_MARKS) + ("," if word.endswith(",") else "")  # "In July, 4 people" has no date
        self._before = "" if word.endswith((".", "!", "?")) else " ".join([*before, bare]).strip()

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


# From the spoken form back to the written text

#: How many characters a voice may skip between two words, because it cannot pronounce them.
MAX_SKIPPED: Final = 200
#: How many characters are kept for a voice that reports the times of words late, or not at all: more than a lexicon
#: makes of the text that is converted at a stretch.
MAX_KEPT: Final = 1 << 15
#: Punctuation that is not part of a word with times.
_AROUND: Final = "\"'`.,:;!?…()[]{}“”‘’«»„¿¡।。，、：；！？"


class WrittenWords:
    """A converter of word times and ends of clauses from the spoken form, which a voice reads, to the written text.

    A written word that is read as several spoken words ("$20") lasts from the first to the last of them, and is
    returned after the last. Words without a written form are returned as they are read. Each returned word has its
    position in the written text.
    """

    def __init__(self) -> None:
        #: The pieces given to the voice, from the one that it is reading; and how far it has read in that piece's text.
        self._pieces: deque[Spoken] = deque()
        self._unread = ""
        self._read = 0
        #: Where these pieces begin in the whole spoken form, and where the text before them ends in the written text.
        self._begin = 0
        self._written = 0
        #: The written word that is being read, when it began, and when its last spoken word ended.
        self._open: tuple[Spoken, int, int] | None = None

    def add(self, pieces: Iterable[Spoken]) -> None:
        """Add the next pieces of the spoken form that are given to the voice."""
        for piece in pieces:
            self._pieces.append(piece)
            self._unread += piece.text
        while len(self._unread) > MAX_KEPT:
            self._drop_first()

    def place(self, words: Iterable[Word]) -> tuple[Word, ...]:
        """Add ``words``, the next words that the voice reports, and return the written words that are complete."""
        placed: list[Word] = []
        for word in words:
            piece = self._piece_of(word.text.strip().lower())
            if piece is None:
                placed += [*self.rest(), word]
                continue
            if self._open is not None and self._open[0] is not piece:
                placed += self.rest()
            if not piece.written:
                placed.append(Word(word.text, word.start_ms, word.end_ms, piece.end))
                continue
            start_ms = word.start_ms if self._open is None else self._open[1]
            self._open = (piece, start_ms, word.end_ms)
            if not any(map(str.isalnum, self._unread[self._read : len(piece.text)])):
                placed += self.rest()
        return tuple(placed)

    def written_end(self, end: int) -> int:
        """Return the position in the written text for ``end``, a position in the spoken form.

        ``end`` must not decrease from call to call.
        """
        while self._pieces and self._begin + len(self._pieces[0].text) <= end:
            self._drop_first()
        return self._written

    def rest(self) -> tuple[Word, ...]:
        """End the written word that is being read, if any, and return it: the voice has gone on, or has ended."""
        if self._open is None:
            return ()
        (piece, start_ms, end_ms), self._open = self._open, None
        return (Word(piece.written.strip(_AROUND) or piece.written, start_ms, end_ms, piece.end),)

    def _piece_of(self, word: str) -> Spoken | None:
        """Return the piece that contains ``word``, the next spoken word; None if no piece contains it."""
        found = self._unread[self._read : self._read + MAX_SKIPPED + len(word)].lower().find(word) if word else -1
        if found < 0:
            return None
        self._read += found
        while self._read >= len(self._pieces[0].text):
            self._drop_first()
        self._read += len(word)
        return self._pieces[0]

    def _drop_first(self) -> None:
        piece = self._pieces.popleft()
        length = len(piece.text)
        self._begin += length
        self._written = piece.end
        self._unread = self._unread[length:]
        self._read = max(0, self._read - length)


# Markup within a line

#: Tags that models write. Others, such as a type in angle brackets, are text.
_TAG_NAMES: Final = (
    "a|abbr|b|big|blockquote|br|button|center|cite|code|dd|del|details|div|dl|dt|em|figcaption|figure|font|form|h[1-6]|hr|"
    "i|iframe|img|input|ins|kbd|label|li|mark|ol|p|pre|q|s|samp|script|section|small|source|span|strike|strong|style|sub|"
    "summary|sup|table|tbody|td|th|thead|tr|tt|u|ul|var|video|audio"
)
_TAG: Final = re.compile(rf"</?(?:{_TAG_NAMES})(?:/?|\s[^<>]*)>", re.IGNORECASE)
_BREAK: Final = re.compile(r"<br ?/?>", re.IGNORECASE)
_OPEN_TAG: Final = re.compile(
    r"<(?:a|br|button|code|details|div|font|h[1-6]|hr|iframe|img|input|label|li|ol|p|pre|source|span|table|td|th|tr|ul|"
    r"video|audio)$",
    re.IGNORECASE,
)
#: Characters that may follow the name of a tag.
_ATTRIBUTE: Final = re.compile(r"[\w:-]+=|/?>|[a-z-]+>?$")
#: A placeholder in angle brackets, such as <your name>.
_PLACEHOLDER: Final = re.compile(r"^<(?=[A-Za-z])|(?<=[A-Za-z])>(?=[.,;:!?]*$)")
_TYPE_ARGUMENT: Final = re.compile(r"(?<=\w)<(\w+)>")
_COMMENT: Final = re.compile(r"<!--.*?(?:-->|$)")
_AUTOLINK: Final = re.compile(r"<((?:https?://|mailto:)?[^\s<>@]*[.@:][^\s<>]*)>")

_LINK_END: Final = re.compile(r"\](?:\((?:[^\s()]|\([^\s()]{0,200}\)){0,2000}\)|\[[^\]\s]{0,200}\])")
_OPEN_LINK_END: Final = re.compile(r"\]\((?!.*\)).*$")
_REFERENCE: Final = re.compile(r"\[\^[\w-]{1,40}\]:?|\[\d{1,3}(?:[,–-]\d{1,3})*\](?!\()|【[^】]{0,80}】")
#: An address, in which nothing is markup.
_ADDRESS: Final = re.compile(r"(?:(?:https?|ftp)://|www\.)[^\s<>\"“”|]+|[\w.+-]{1,64}@[\w-]{1,64}(?:\.[\w-]{1,64})+")
#: Words without markup.
_BARE: Final = re.compile(r"[A-Za-z0-9'’\"“”,.;:!?()%+=-]+")
_BEHIND_ADDRESS: Final = ".,;:!?*_~'’…]}»"

_ESCAPED: Final = re.compile(r"\\([$#%&.\-+!])")
_STARS: Final = re.compile(r"\*+|~~+|\\[*_`\[\](){}~>|]")
#: Operands of a multiplication or a power: before a star, and after it.
_OPERAND: Final = re.compile(r"(?:\d|(?<![^\W\d_])[^\W\d_]|\))$")
_OPERAND_BEHIND: Final = re.compile(r"[-−]?\d|[^\W\d_](?![^\W\d_])|\(|[^\W\d_]{1,12}\(")
_NUMBER: Final = re.compile(r"[-−]?\d")
_LETTERS: Final = re.compile(r"[^\W\d_]+(?!\*)")
_WINDOWS_PATH: Final = re.compile(r"[\"'“(]*(?:[A-Za-z]:\\|\\\\)\w")
_UNDERSCORES: Final = re.compile(r"(?<![^\W_])_+|_+(?![^\W_])")

_EMOJI: Final = re.compile(
    "[\U0001f000-\U0001faff\u2600-\u2767\u2776-\u2793\u2b00-\u2bff\u231a-\u231b\u23e9-\u23fa\u25a0-\u25ff\u2190\u2139\u203c\u2049"
    "\u2b50\u3030\u303d\ufe0e\ufe0f\u200b-\u200f\u2060\ufeff\u20e3\u00ad\u200d\U000e0020-\U000e007f]+"
)
#: Letters in special styles (bold, script, …), ligatures, and units in a single character.
_STYLED: Final = re.compile("[\U0001d400-\U0001d7ff\ufb00-\ufb06\u2103\u2109\u3371-\u33df]")
#: Numbers in a circle.
_CIRCLED: Final = re.compile("[\u2460-\u2473\u2776-\u2793]")
_KEYCAP: Final = re.compile("([0-9])\ufe0f?\u20e3")

#: Amounts of money, and formulas that could be mistaken for one.
_DOLLARS: Final = re.compile(r"\$[-−+]?\.?\d")
#: An amount before its sign, and the sign of a certain dollar or of Brazil's currency; a sign by itself.
_DOLLARS_BEHIND: Final = re.compile(r"[^\w$]*\d[\d.,–-]*\$(?:[^\w$].*)?|[^\w$]*[A-Z]{1,3}\$")
_BARE_DOLLAR: Final = re.compile(r"\$[^\w$]*")
_FORMULA: Final = re.compile(r"\$[^$]+\$(?!\d)|\$\d+(?:\.\d+)?(?!s\b)[ac-jln-zAC-JLN-SU-Z]")

_LATEX: Final = re.compile(r"\\[a-zA-Z]+|\\[()\[\],;!]|\$\$|[{}]")
_LATEX_HINT: Final = re.compile(r"\\[a-zA-Z]{2,}|\\[()\[\]]")

#: The ends of what is skipped: a link, a tag, a comment.
_LINK_ENDS, _TAG_ENDS, _COMMENT_ENDS = ")", ">", "-->"


class InlineMarkup:
    """A filter that removes markup from words: emphasis, links, code, tags, entities, emoji, LaTeX.

    Words are separated by white space. Markup that spans several words (code, a tag with attributes, the title of a
    link) is followed to its end, at most to the end of the line, except comments. Time is linear in the length of a
    word.
    """

    def __init__(self, *, picture: str) -> None:
        #: The text to say before the description of a picture.
        self._picture = picture
        self._in_code = False
        #: Whether a dollar sign in this line may have begun a formula, which the next dollar sign ends.
        self._dollar = False
        #: Whether the word before is a dollar sign by itself: that of an amount, if a number follows.
        self._after_sign = False
        #: Whether the word before is a number.
        self._after_number = False
        #: The end of what is being skipped; None if nothing is.
        self._skipping: str | None = None

    def end_line(self) -> None:
        """End the line, and with it all open markup except a comment."""
        self._in_code = self._dollar = self._after_number = self._after_sign = False
        if self._skipping != _COMMENT_ENDS:
            self._skipping = None

    def clean(self, word: str) -> str:
        """Return ``word`` without its markup; the result may be empty, or several words."""
        cleaned = self._cleaned(word)
        if self._after_sign and cleaned[:1].isdecimal():
            cleaned, self._dollar = f"${cleaned}", False
        self._after_sign = self._dollar and word == "$"
        self._after_number = cleaned[-1:].isdecimal()
        return cleaned

    def _cleaned(self, word: str) -> str:
        if self._skipping is not None:
            if self._skipping == _TAG_ENDS and not _ATTRIBUTE.match(word):
                self._skipping = None
                return self._cleaned(word)
            _, end, word = word.partition(self._skipping)
            if not end:
                return ""
            self._skipping = None
        if "`" not in word:
            return _code(word) if self._in_code else self._prose(word)
        cleaned: list[str] = []
        for part in re.split(r"(`+)", word):
            if part.startswith("`"):
                self._in_code = not self._in_code
            elif part:
                cleaned.append(_code(part) if self._in_code else self._prose(part))
        return "".join(cleaned)

    def _prose(self, word: str) -> str:
        if _BARE.fullmatch(word) and "www." not in word:
            return word
        if "<" in word or ">" in word:
            word = self._without_tags(word)
        if "]" in word or "[" in word or "【" in word:
            word = self._without_brackets(word)
        found = _ADDRESS.search(word) if "." in word or "/" in word else None
        if found is None:
            return self._without_signs(word)
        address = found[0].rstrip(_BEHIND_ADDRESS)
        while address.endswith(")") and address.count(")", -20) > address.count("(", -200):
            address = address[:-1]
        behind = self._without_signs(word[found.start() + len(address) :])
        return self._without_signs(word[: found.start()]) + _address(address) + behind

    def _without_tags(self, word: str) -> str:
        if "<!--" in word:
            if "-->" not in word:
                self._skipping = _COMMENT_ENDS
            word = _COMMENT.sub("", word)
        word = _AUTOLINK.sub(r"\1", word)
        word = _TAG.sub("", _BREAK.sub(", ", word))
        if _OPEN_TAG.search(word):
            self._skipping = _TAG_ENDS
            word = _OPEN_TAG.sub("", word)
        return _PLACEHOLDER.sub("", _TYPE_ARGUMENT.sub(r" \1", word))

    def _without_brackets(self, word: str) -> str:
        word = _REFERENCE.sub("", _LINK_END.sub("", word))
        if "](" in word and _OPEN_LINK_END.search(word):
            self._skipping = _LINK_ENDS
            word = _OPEN_LINK_END.sub("", word)
        word = re.sub(r"!\[(?=(.?))", lambda match: f"{self._picture}: " if match[1] else self._picture, word)
        return word.replace("\\[", "").replace("\\]", "").replace("[", "").replace("]", "")

    def _without_signs(self, word: str) -> str:
        if "&" in word and ";" in word:
            word = html.unescape(word)
        if "\\" in word and not _WINDOWS_PATH.match(word):
            is_latex = _LATEX_HINT.search(word)
            self._dollar ^= is_latex is not None and word.count("$") % 2 == 1
            word = _latex(word) if is_latex else _ESCAPED.sub(r"\1", word)
        if "$" in word:
            word = self._without_dollars(word)
        if "*" in word or "~~" in word or "\\" in word:
            word = word if word in ("*", "**") else _STARS.sub(_without_star, word)
        if "_" in word:
            word = _UNDERSCORES.sub("", word).replace("_", " ")
        if not word.isascii():
            word = _CIRCLED.sub(lambda match: f" {unicodedata.numeric(match[0]):.0f} ", word)
            word = _EMOJI.sub("", _KEYCAP.sub(r"\1", word))
            if _STYLED.search(word):
                word = unicodedata.normalize("NFKC", word)
        return word

    def _without_dollars(self, word: str) -> str:
        """Return ``word`` without dollar signs around a formula; dollar signs of amounts of money stay."""
        behind = self._after_number and _BARE_DOLLAR.fullmatch(word)
        if not self._dollar and (behind or _DOLLARS_BEHIND.fullmatch(word)):
            return word
        if word.count("$") % 2:
            self._dollar = not self._dollar
        if _DOLLARS.search(word) and not _FORMULA.search(word):
            return word
        return word.replace("$", "")


def _without_star(match: re.Match[str]) -> str:
    """Return the replacement of matched stars: "×" or "^" between numbers or variables; "" if they are markup."""
    marks, before = match[0], match.string[max(0, match.start() - 2) : match.start()]
    if marks not in ("*", "**") or not before or match.string.startswith("*"):
        return ""
    behind = match.string[match.end() : match.end() + 20]
    usual = _OPERAND.search(before) and _OPERAND_BEHIND.match(behind)
    product = marks == "*" and before[-1].isdigit() and _LETTERS.match(behind)
    power = marks == "**" and before[-1].isalnum() and _NUMBER.match(behind) and match.string.count("**") == 1
    if not (usual or product or power):
        return ""
    if match.string.rstrip(".,;:!?)\"'").endswith(marks):
        return ""
    return " × " if marks == "*" else "^"


def _code(word: str) -> str:
    """Return the spoken form of a word of code: "max_size" becomes "max size"."""
    if not word.isascii():
        word = _EMOJI.sub("", word)
    return word.replace("_", " ").replace("()", "")


def _address(address: str) -> str:
    """Return the part of an address that a person would say: the host, and a path if it is one short word."""
    if "@" in address and "://" not in address:
        return address
    host, _, path = re.sub(r"^\w+://", "", address).partition("/")
    host = host.rpartition("@")[2].removeprefix("www.")
    path = path.rstrip("/")
    return f"{host}/{path}" if re.fullmatch(r"[A-Za-z]{1,12}", path) else host


def _latex(word: str) -> str:
    word = word.replace("}{", " ⁄ " if "frac" in word else " ")

    def read(match: re.Match[str]) -> str:
        name = match[0][1:] if match[0].startswith("\\") else ""
        said = table_of("markup")["latex"].get(name, "")
        return f" {said} " if said else ""

    return " ".join(_LATEX.sub(read, word).replace("$", "").split())


# Tables

#: A longer line, in characters, is read as text. A row is converted at once, which takes up to 20 ms.
MAX_ROW: Final = 1000

_DELIMITERS: Final = re.compile(r"\|[\s|:-]*-[\s|:-]*")
_CELL: Final = re.compile(r"(?:[^|\\]|\\.)*")
_YES: Final = frozenset(("✅", "✔", "✔️", "✓", "☑", "☑️"))
_NO: Final = frozenset(("❌", "✗", "✘", "✖", "✖️"))


class TableWord(NamedTuple):
    """A word read for a row of a table, and its range in the text. Added labels and pauses have ``start == end``."""

    text: str
    start: int
    end: int


class SpokenTable:
    """A converter of the lines of a table to sentences: "Alice: Age 30, City Paris." for a row.

    The first line is held back until the next one shows whether the first has the names of the columns. The name of a
    column is said before each value in it, except in the first column, whose values name the rows.
    """

    def __init__(self, phrases: Mapping[str, str]) -> None:
        self._phrases = phrases
        self._held: tuple[str, int] | None = None
        self._names: list[list[str]] = []
        self._begun = False

    def feed(self, line: str, at: int) -> list[TableWord]:
        """Add ``line``, at position ``at`` of the text, and return the words of the rows that can be read now."""
        line = line.rstrip()
        if _DELIMITERS.fullmatch(line):
            if self._held is not None:
                self._names = [_plain(cell) for cell, _ in _cells(self._held[0])]
                self._held, self._begun = None, True
            return []
        if not self._begun and self._held is None:
            self._held = (line, at)
            return []
        rows = self._row(*self._held) if self._held is not None else []
        self._held, self._begun = None, True
        return rows + self._row(line, at)

    def end(self) -> list[TableWord]:
        """End the table, and return the words of the row that was held back."""
        rows = self._row(*self._held) if self._held is not None else []
        self._held, self._names, self._begun = None, [], False
        return rows

    def _row(self, line: str, at: int) -> list[TableWord]:
        words: list[TableWord] = []
        for column, (cell, place) in enumerate(_cells(line)):
            start = at + place
            said = [
                TableWord(match[0].replace("\\|", " "), start + match.start(), start + match.end())
                for match in re.finditer(r"\S+", cell)
            ]
            if not said:
                continue
            if len(said) == 1 and self._phrases:
                said[0] = said[0]._replace(text=self._yes_or_no(said[0].text))
            if words:
                words.append(TableWord(":" if column == 1 and self._names else ",", start, start))
            if 0 < column < len(self._names):
                words += [TableWord(name, start, start) for name in self._names[column]]
            words += said
        if words:
            end = words[-1].end
            words += [TableWord(".", end, end), TableWord("\n", end, end)]
        return words

    def _yes_or_no(self, text: str) -> str:
        return self._phrases["yes"] if text in _YES else self._phrases["no"] if text in _NO else text


def _cells(line: str) -> list[tuple[str, int]]:
    """Return the cells of a line that begins with "|", each with its position."""
    cells: list[tuple[str, int]] = []
    at = 1
    while at < len(line):
        found = _CELL.match(line, at)
        end = found.end() if found else at
        cells.append((line[at:end], at))
        at = end + 1
    return cells


def _plain(cell: str) -> list[str]:
    markup = InlineMarkup(picture="")
    return " ".join(markup.clean(word) for word in cell.split()).split()
