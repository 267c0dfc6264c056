"""The flite synthesiser of the system, by ctypes. Only in the voice worker: the library keeps global state."""

from __future__ import annotations

import ctypes
import re
import unicodedata
from pathlib import Path
from typing import Any, Protocol

from omni_ws.engine.tts.synthesiser import NoVoice, SpokenWord, SynthesisListener, VoiceFacts

#: ``rms`` first: other people and recognisers understand it best.
VOICES = ("rms", "slt", "awb", "kal16", "kal")

#: About 100 ms a chunk.
CHUNK_SAMPLES = 1600

_NAMES = ("lib{}.so.1", "lib{}.so", "lib{}.dylib")
_VOID = ctypes.c_void_p
_WORD_START = b"R:Token.daughter1.R:SylStructure.daughter1.daughter1.R:Segment.p.end"
_WORD_END = b"R:Token.daughtern.R:SylStructure.daughtern.daughtern.R:Segment.end"

#: Typography that flite would pass over in silence.
_PLAIN = str.maketrans(
    {"’": "'", "‘": "'", "“": '"', "”": '"', "—": ", ", "–": "-", "…": "...", "×": " times ", "÷": " divided by "}
)


class _Wave(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_char_p),
        ("sample_rate", ctypes.c_int),
        ("num_samples", ctypes.c_int),
        ("num_channels", ctypes.c_int),
        ("samples", ctypes.POINTER(ctypes.c_short)),
    )


class _StreamingInfo(ctypes.Structure):
    pass


_Callback = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(_Wave), ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.POINTER(_StreamingInfo)
)
_StreamingInfo._fields_ = (
    ("min_buffsize", ctypes.c_int),
    ("asc", _Callback),
    ("utt", _VOID),
    ("item", _VOID),
    ("userdata", _VOID),
)


class _VoiceStruct(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("features", _VOID))


class _StreamingInfoPointer(Protocol):
    contents: Any


_FUNCTIONS: tuple[tuple[str, Any, tuple[Any, ...]], ...] = (
    ("new_audio_streaming_info", ctypes.POINTER(_StreamingInfo), ()),
    ("audio_streaming_info_val", _VOID, (ctypes.POINTER(_StreamingInfo),)),
    ("feat_set", None, (_VOID, ctypes.c_char_p, _VOID)),
    ("feat_set_float", None, (_VOID, ctypes.c_char_p, ctypes.c_float)),
    ("flite_init", ctypes.c_int, ()),
    ("flite_synth_text", _VOID, (ctypes.c_char_p, ctypes.POINTER(_VoiceStruct))),
    ("delete_utterance", None, (_VOID,)),
    ("utt_relation", _VOID, (_VOID, ctypes.c_char_p)),
    ("relation_head", _VOID, (_VOID,)),
    ("item_next", _VOID, (_VOID,)),
    ("ffeature_string", ctypes.c_char_p, (_VOID, ctypes.c_char_p)),
    ("ffeature_float", ctypes.c_float, (_VOID, ctypes.c_char_p)),
)


class Flite:
    """Streams 16 kHz speech (8 kHz for ``kal``) with word times."""

    def __init__(self) -> None:
        """Raises NoVoice where the library or all of its voices are missing."""
        self._flite = _library("flite")
        for name in ("flite_usenglish", "flite_cmulex"):
            _library(name)
        for name, result, arguments in _FUNCTIONS:
            try:
                function = getattr(self._flite, name)
            except AttributeError as error:
                raise NoVoice(f"libflite does not have {name}") from error
            function.restype, function.argtypes = result, list(arguments)
        self._flite.flite_init()
        self._listener: SynthesisListener | None = None
        self._callback = _Callback(self._on_chunk)
        self._voices = {name: voice for name in VOICES if (voice := self._register(name)) is not None}
        if not self._voices:
            raise NoVoice("libflite is there, but none of its English voices")
        names = tuple(self._voices)
        languages = dict.fromkeys(names, "en")
        self.facts = VoiceFacts("flite", f"system libflite{_version()}", names, languages, latin_only=True)

    def speak(self, text: str, voice: str, listener: SynthesisListener, *, speed: float) -> None:
        plain = speakable(text)
        if not plain:
            return
        chosen = self._voices[voice]
        self._flite.feat_set_float(chosen.contents.features, b"duration_stretch", 1 / speed)
        self._listener = listener
        try:
            utterance = self._flite.flite_synth_text(plain.encode("ascii"), chosen)
            if utterance:
                self._flite.delete_utterance(utterance)
        finally:
            self._listener = None

    def _register(self, name: str) -> Any:
        """The voice, set up to stream; None where it is not installed."""
        try:
            register = getattr(_library(f"flite_cmu_us_{name}"), f"register_cmu_us_{name}")
        except (NoVoice, AttributeError):
            return None
        register.restype, register.argtypes = ctypes.POINTER(_VoiceStruct), [ctypes.c_char_p]
        voice = register(None)
        if not voice:
            return None
        streaming = self._flite.new_audio_streaming_info()
        streaming.contents.min_buffsize = CHUNK_SAMPLES
        streaming.contents.asc = self._callback
        value = self._flite.audio_streaming_info_val(streaming)
        self._flite.feat_set(voice.contents.features, b"streaming_info", value)
        return voice

    def _on_chunk(self, wave: Any, start: int, size: int, last: int, streaming: _StreamingInfoPointer) -> int:
        listener = self._listener
        if listener is None:
            return -1
        if start == 0:
            listener.words(self._words(streaming.contents.utt))
        first = ctypes.addressof(wave.contents.samples.contents) + 2 * start
        go_on = listener.audio(wave.contents.sample_rate, ctypes.string_at(first, 2 * size))
        return 0 if go_on else -1

    def _words(self, utterance: int) -> list[SpokenWord]:
        """The tokens of the text with their times; those that are not spoken have none."""
        words: list[SpokenWord] = []
        item = self._flite.relation_head(self._flite.utt_relation(utterance, b"Token"))
        while item:
            start = self._flite.ffeature_float(item, _WORD_START)
            end = self._flite.ffeature_float(item, _WORD_END)
            if end > start:
                name = self._flite.ffeature_string(item, b"name").decode("ascii", "replace")
                words.append(SpokenWord(name, round(start * 1000), round(end * 1000)))
            item = self._flite.item_next(item)
        return words


def speakable(text: str) -> str:
    """``text`` in the characters that flite knows; empty where none of it can be spoken."""
    ascii_text = unicodedata.normalize("NFKD", text.translate(_PLAIN)).encode("ascii", "ignore").decode()
    # Control characters and NUL would end the text for the C library.
    plain = " ".join(re.sub(r"[^\x20-\x7e]+", " ", ascii_text).split())
    return plain if any(character.isalnum() for character in plain) else ""


def _version() -> str:
    """The library cannot be asked; on Linux the name of its file tells. Empty where it does not."""
    try:
        found = re.search(r"libflite\.so\.(\d+\.[\d.]*\d)", Path("/proc/self/maps").read_text())
    except OSError:
        return ""
    return f" {found[1]}" if found else ""


def _library(name: str) -> Any:
    for pattern in _NAMES:
        try:
            return ctypes.CDLL(pattern.format(name), mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
    raise NoVoice(f"lib{name} is not installed")
