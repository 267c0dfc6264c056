"""espeak-ng as a synthesiser: it streams speech with word times. Only the voice worker loads it."""

from __future__ import annotations

import ctypes
import re
import unicodedata
from bisect import bisect_right
from ctypes.util import find_library
from typing import Any, Final

from omni_ws.engine.tts.synthesiser import (
    NoVoice,
    PronouncedWord,
    Speak,
    SpokenWord,
    SynthesisListener,
    VoiceFacts,
)

DEFAULT_LANGUAGE = "en-us"
CHUNK_MS = 60
#: The usual speaking rate of its voices. Words follow another rate within a tenth; pauses change more than words.
WORDS_PER_MINUTE = 175

_SYNCHRONOUS = 2
_RATE = 1
#: Phonemes are told, by their names in IPA.
_PHONEME_EVENTS = 1 | 2
_DO_NOT_EXIT = 0x8000
_UTF8 = 1
#: The phonemes of a text in IPA, with a tie between letters that are one phoneme.
_TIE: Final = "^"
_TIED_IPA: Final = 0x02 | 0x80 | ord(_TIE) << 8
_TIED: Final = re.compile(r".(?:\^.)*")
#: A word in another language is marked by the names of both: "(en)…(es)".
_LANGUAGE_MARK: Final = re.compile(r"\([a-z][a-z0-9-]*\)")
_UTF8_WITH_END_PAUSE = 0x1001
_WORD_EVENT = 1
_END_EVENT = 5
_PHONEME_EVENT = 7
_CHARACTER_POSITION = 1


class _Event(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("unique_identifier", ctypes.c_uint),
        ("text_position", ctypes.c_int),
        ("length", ctypes.c_int),
        ("audio_position", ctypes.c_int),
        ("sample", ctypes.c_int),
        ("user_data", ctypes.c_void_p),
        ("id", ctypes.c_char * 8),
    )


class _VoiceStruct(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("languages", ctypes.c_char_p), ("identifier", ctypes.c_char_p))


_Callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(_Event))


class Espeak:
    """The Synthesiser espeak-ng, which streams speech at 22.05 kHz with word times.

    A voice's name is the English name of its language; the English voices come first.
    """

    def __init__(self) -> None:
        """Load the library. Raises NoVoice if it is not installed."""
        path, data, source = _find()
        try:
            self._espeak: Any = ctypes.CDLL(path)
        except OSError as error:
            raise NoVoice(f"espeak-ng cannot be loaded: {error}") from error
        self._declare()
        self._rate: int = self._espeak.espeak_Initialize(_SYNCHRONOUS, CHUNK_MS, data, _PHONEME_EVENTS | _DO_NOT_EXIT)
        if self._rate <= 0:
            raise NoVoice("espeak-ng finds no voice data")
        self._listener: SynthesisListener | None = None
        self._times = WordTimes("")
        #: The words of a text that is only to be pronounced; None while one is spoken.
        self._pronounced: list[PronouncedWord] | None = None
        self._callback = _Callback(self._on_chunk)
        self._espeak.espeak_SetSynthCallback(self._callback)
        version = self._espeak.espeak_Info(None).decode().split()[0]
        languages, self._identifiers = self._listed_voices()
        names = sorted(
            languages,
            key=lambda name: (languages[name] != DEFAULT_LANGUAGE, not languages[name].startswith("en"), name),
        )
        self.facts = VoiceFacts(f"espeak-ng {version}", f"{source}, GPLv3, own process", tuple(names), languages)

    def speak(self, asked: Speak, listener: SynthesisListener) -> None:
        plain = asked.text.replace("\0", " ")
        self._listener, self._times = listener, WordTimes(plain)
        self._synthesise(plain, asked.voice, asked.speed)

    def pronounced(self, text: str, voice: str) -> list[PronouncedWord]:
        """Return the words of ``text`` as the voice pronounces them.

        espeak-ng has two interfaces: its events have the positions of words, but cut the phonemes' names to seven
        bytes; ``espeak_TextToPhonemes`` has whole names, but no positions. Usually both find the same words, and are
        combined; otherwise the words of the events are returned.
        """
        plain = text.replace("\0", " ")
        words = self._pronounced = []
        try:
            self._synthesise(plain, voice, 1.0)
        finally:
            self._pronounced = None
        whole = self._phonemes(plain)
        if len(whole) == len(words):
            return [PronouncedWord(word.position, found) for word, found in zip(words, whole, strict=True)]
        return words

    def _phonemes(self, text: str) -> list[list[str]]:
        """Return the phonemes of each word of ``text``, as the voice that was used last pronounces it."""
        encoded = ctypes.create_string_buffer(text.encode())
        rest, words = ctypes.c_void_p(ctypes.addressof(encoded)), list[list[str]]()
        while rest.value:
            told = self._espeak.espeak_TextToPhonemes(ctypes.byref(rest), _UTF8, _TIED_IPA)
            without_languages = _LANGUAGE_MARK.sub("", (told or b"").decode("utf-8", "ignore"))
            words += [
                [phoneme.replace(_TIE, "") for phoneme in _TIED.findall(word)] for word in without_languages.split()
            ]
        return words

    def _synthesise(self, plain: str, voice: str, speed: float) -> None:
        if self._espeak.espeak_SetVoiceByName(self._identifiers[voice]) != 0:
            raise NoVoice(f"espeak-ng has no voice {voice!r}")
        self._espeak.espeak_SetParameter(_RATE, round(WORDS_PER_MINUTE * speed), 0)
        encoded = plain.encode() + b"\0"
        try:
            self._espeak.espeak_Synth(
                encoded, len(encoded), 0, _CHARACTER_POSITION, 0, _UTF8_WITH_END_PAUSE, None, None
            )
        finally:
            self._listener = None

    def interrupt(self) -> None:
        """Do nothing: espeak-ng is so fast that an interruption is not needed."""

    def _declare(self) -> None:
        functions: tuple[tuple[str, Any, tuple[Any, ...]], ...] = (
            ("espeak_Initialize", ctypes.c_int, (ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_int)),
            ("espeak_Info", ctypes.c_char_p, (ctypes.c_void_p,)),
            ("espeak_SetSynthCallback", None, (_Callback,)),
            ("espeak_SetVoiceByName", ctypes.c_int, (ctypes.c_char_p,)),
            ("espeak_SetParameter", ctypes.c_int, (ctypes.c_int, ctypes.c_int, ctypes.c_int)),
            ("espeak_ListVoices", ctypes.POINTER(ctypes.POINTER(_VoiceStruct)), (ctypes.c_void_p,)),
            (
                "espeak_TextToPhonemes",
                ctypes.c_char_p,
                (ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, ctypes.c_int),
            ),
            (
                "espeak_Synth",
                ctypes.c_int,
                (
                    ctypes.c_char_p,
                    ctypes.c_size_t,
                    ctypes.c_uint,
                    ctypes.c_int,
                    ctypes.c_uint,
                    ctypes.c_uint,
                    ctypes.c_void_p,
                    ctypes.c_void_p,
                ),
            ),
        )
        for name, result, arguments in functions:
            try:
                function = getattr(self._espeak, name)
            except AttributeError as error:
                raise NoVoice(f"the espeak-ng library does not have {name}") from error
            function.restype, function.argtypes = result, list(arguments)

    def _listed_voices(self) -> tuple[dict[str, str], dict[str, bytes]]:
        """Return languages and identifiers of the voices, by name. Only the identifier selects a voice reliably."""
        languages: dict[str, str] = {}
        identifiers: dict[str, bytes] = {}
        listed = self._espeak.espeak_ListVoices(None)
        place = 0
        while listed[place]:
            voice = listed[place].contents
            place += 1
            # The first byte is the voice's priority for the language that follows.
            language = voice.languages[1:].decode("utf-8", "replace")
            name = voice.name.decode("utf-8", "replace").strip()
            if name in languages:
                name = language
            languages.setdefault(name, language)
            identifiers.setdefault(name, voice.identifier)
        return languages, identifiers

    def _on_chunk(self, samples: int | None, count: int, events: Any) -> int:
        if self._pronounced is not None:
            self._note_phonemes(events, self._pronounced)
            return 0
        listener = self._listener
        if listener is None:
            return 1
        words = self._words(events)
        if words:
            listener.words(words)
        if samples is None or count <= 0:
            return 0
        return 0 if listener.audio(self._rate, ctypes.string_at(samples, 2 * count)) else 1

    def _note_phonemes(self, events: Any, words: list[PronouncedWord]) -> None:
        place = 0
        while (event := events[place]).type:
            place += 1
            if event.type == _WORD_EVENT:
                words.append(PronouncedWord(event.text_position - 1, []))
            elif event.type == _PHONEME_EVENT and event.id and words:
                words[-1].phonemes.append(event.id.decode("utf-8", "ignore"))

    def _words(self, events: Any) -> list[SpokenWord]:
        """Return the words that ended in a chunk of audio; ``events`` are the events of this chunk."""
        words: list[SpokenWord | None] = []
        place = 0
        while (event := events[place]).type:
            place += 1
            if event.type == _WORD_EVENT:
                words.append(self._times.begins(event.text_position - 1, event.audio_position))
            elif event.type == _END_EVENT:
                words.append(self._times.ends(event.audio_position))
            elif event.type == _PHONEME_EVENT and not event.id:  # a pause
                self._times.pauses(event.audio_position)
            elif event.type == _PHONEME_EVENT:
                self._times.sounds()
        return [word for word in words if word is not None]


def _find() -> tuple[str, bytes | None, str]:
    """Find the library; return its path, the path of its data (None: the built-in one), and a text about its origin."""
    try:
        import espeakng_loader
    except ImportError:
        path = find_library("espeak-ng")
        if path is None:
            raise NoVoice("espeak-ng is not installed") from None
        return path, None, "system libespeak-ng"
    try:
        return espeakng_loader.get_library_path(), espeakng_loader.get_data_path().encode(), "espeakng-loader"
    except RuntimeError as error:
        raise NoVoice(f"espeakng-loader is incomplete: {error}") from error


# Words with their times

_TOKEN: Final = re.compile(r"[^\s—…]+")
_OPENING: Final = "\"'`({[“‘«¿¡「『（"
_CLOSING: Final = "\"'`.,:;!?)}]”’»、。，；：！？」』）"


class WordTimes:
    """A converter of espeak-ng's events to the timed words of the text that it speaks.

    Times are in milliseconds from the start of the text's audio.

    A word is a run of characters without white space, without the punctuation around it, or one letter of a script that
    is written without spaces. espeak-ng's own words are not used, only their positions in the text: it reports several
    words in a number ("21" is two words, "3.5" three, all at positions inside the number), and often wrong lengths.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        tokens = [match.span() for match in _TOKEN.finditer(text)]
        self._starts = [start for start, _ in tokens]
        self._ends = [end for _, end in tokens]
        #: The word being spoken, if any: its first character, the end of its token, and when it began.
        self._word: tuple[int, int, int] | None = None
        #: When a pause began that may be the end of the word; None while the word is audible.
        self._silent_from_ms: int | None = None

    def begins(self, position: int, at_ms: int) -> SpokenWord | None:
        """Note that the speech of the character at ``position`` begins; return the word that ended before, if any."""
        if not self._starts:
            return None
        token = max(0, bisect_right(self._starts, position) - 1)
        if position >= self._ends[token]:
            token = min(token + 1, len(self._starts) - 1)
        start, end = self._starts[token], self._ends[token]
        word = self._word
        first = start
        if word is not None and word[1] == end:
            if not (word[0] < position < end and unicodedata.category(self._text[position]) == "Lo"):
                self._silent_from_ms = None
                return None
            first = position
        ended = self.ends(at_ms, before=first)
        self._word, self._silent_from_ms = (first, end, at_ms), None
        return ended

    def sounds(self) -> None:
        self._silent_from_ms = None

    def pauses(self, at_ms: int) -> None:
        if self._silent_from_ms is None:
            self._silent_from_ms = at_ms

    def ends(self, at_ms: int, *, before: int | None = None) -> SpokenWord | None:
        """End the word being spoken; return the word if it was audible.

        The word ends where the pause before ``at_ms`` began, if there is one. ``before`` is the index in the text of
        the next word.
        """
        word, self._word = self._word, None
        if word is None:
            return None
        first, last, start_ms = word
        end_ms = at_ms if self._silent_from_ms is None else self._silent_from_ms
        if end_ms <= start_ms:
            return None
        if before is not None and before > first:
            last = min(before, last)
        text = self._text[first:last]
        return SpokenWord(text.lstrip(_OPENING).rstrip(_CLOSING) or text, start_ms, end_ms)
