"""PocketSphinxDecoder: PocketSphinx, called through ctypes.

The package's own Python interface holds the GIL while it decodes, which stalls an event loop for hundreds of
milliseconds. Its extension module exports the C interface as well, and ctypes releases the GIL around every call.
"""

from __future__ import annotations

import ctypes
import json
import re
import threading
from functools import lru_cache
from typing import Any

import numpy as np

from omni_ws.audio.samples import Pcm16
from omni_ws.core.chunks import Word
from omni_ws.engine.asr.utterance import SAMPLE_RATE
from omni_ws.errors import EngineFailed
from omni_ws.installing import install_command

FRAME_MS = 10

#: The mean of the cepstra is set from this much speech before live decoding begins: decoding from the built-in guess
#: gets a third of the words wrong, and 400 ms are too little.
PRIMING_SAMPLES = 600 * SAMPLE_RATE // 1000

#: Chosen by word error rate on recorded clips: the second and third pass cost time and words, and the cap on active
#: models halves the cost.
DECODER_OPTIONS = {"fwdflat": False, "bestpath": False, "maxhmmpf": 3000}

#: Priming ends an utterance, and an utterance that ends is searched. With a grammar of one word that costs nothing;
#: with the whole language it takes a tenth of the length of the speech.
_DICTATION = b"_default"
_PRIMING = b"priming"
_PRIMING_GRAMMAR = b"#JSGF V1.0; grammar priming; public <word> = a;"

_ALTERNATE_PRONUNCIATION = re.compile(r"\(\d+\)$")

_FUNCTIONS: tuple[tuple[str, Any, tuple[Any, ...]], ...] = (
    ("ps_config_parse_json", ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_char_p)),
    ("ps_config_free", ctypes.c_int, (ctypes.c_void_p,)),
    ("ps_init", ctypes.c_void_p, (ctypes.c_void_p,)),
    ("ps_free", ctypes.c_int, (ctypes.c_void_p,)),
    ("ps_add_jsgf_string", ctypes.c_int, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p)),
    ("ps_activate_search", ctypes.c_int, (ctypes.c_void_p, ctypes.c_char_p)),
    ("ps_reinit_feat", ctypes.c_int, (ctypes.c_void_p, ctypes.c_void_p)),
    ("ps_get_cmn", ctypes.c_char_p, (ctypes.c_void_p, ctypes.c_int)),
    ("ps_start_utt", ctypes.c_int, (ctypes.c_void_p,)),
    ("ps_end_utt", ctypes.c_int, (ctypes.c_void_p,)),
    (
        "ps_process_raw",
        ctypes.c_int,
        (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int),
    ),
    ("ps_get_hyp", ctypes.c_char_p, (ctypes.c_void_p, ctypes.c_void_p)),
    ("ps_seg_iter", ctypes.c_void_p, (ctypes.c_void_p,)),
    ("ps_seg_next", ctypes.c_void_p, (ctypes.c_void_p,)),
    ("ps_seg_word", ctypes.c_char_p, (ctypes.c_void_p,)),
    ("ps_seg_frames", None, (ctypes.c_void_p, ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_int))),
)

#: Loading touches state that all decoders of the process share.
_loading = threading.Lock()


@lru_cache(maxsize=1)
def _library() -> tuple[Any, str]:
    """The C interface and the folder of the packaged American English model."""
    try:
        import pocketsphinx
        from pocketsphinx import _pocketsphinx
    except ImportError as error:
        raise EngineFailed(
            f"speech recognition needs the package pocketsphinx: {install_command('embedded')}"
        ) from error
    library = ctypes.CDLL(_pocketsphinx.__file__)
    for name, result, arguments in _FUNCTIONS:
        try:
            function = getattr(library, name)
        except AttributeError as error:
            raise EngineFailed(
                f"this build of pocketsphinx does not export {name}; needed is pocketsphinx 5.1 from its "
                "Linux wheel, or another engine for speech recognition"
            ) from error
        function.restype, function.argtypes = result, list(arguments)
    pocketsphinx.set_loglevel("FATAL")
    return library, f"{pocketsphinx.get_model_path()}/en-us"


class PocketSphinxDecoder:
    """One decoder. Used by one thread at a time; different objects are independent. All calls block.

    Live: ``begin``, ``hear`` …, ``interim`` at any time, ``end``. Whole: ``transcribe``.
    """

    def __init__(self) -> None:
        """Loads the model: half a second, 90 MB. Raises EngineFailed where that is not possible."""
        self._decoder: int | None = None
        self._library, model = _library()
        options = {
            "hmm": f"{model}/en-us",
            "lm": f"{model}/en-us.lm.bin",
            "dict": f"{model}/cmudict-en-us.dict",
            "samprate": SAMPLE_RATE,
            "loglevel": "FATAL",
            **DECODER_OPTIONS,
        }
        with _loading:
            parsed = self._library.ps_config_parse_json(None, json.dumps(options).encode())
            if not parsed:
                raise EngineFailed("the recogniser does not take its own options")
            self._decoder = self._library.ps_init(parsed)
            self._library.ps_config_free(parsed)
        if not self._decoder:
            raise EngineFailed("the recogniser could not load its model")
        self._check(self._library.ps_add_jsgf_string(self._decoder, _PRIMING, _PRIMING_GRAMMAR))
        self._check(self._library.ps_activate_search(self._decoder, _DICTATION))

    def close(self) -> None:
        """Frees the decoder. Idempotent."""
        if self._decoder is not None:
            self._library.ps_free(self._decoder)
            self._decoder = None

    def transcribe(self, pcm: Pcm16) -> tuple[Word, ...]:
        """The words of a whole utterance; equal samples give equal words, whatever the decoder did before.

        Costs about a twelfth of the length of the audio and cannot be interrupted.
        """
        self._check(self._library.ps_reinit_feat(self._decoder, None))
        self._check(self._library.ps_start_utt(self._decoder))
        try:
            self._process(pcm, whole=True)
        finally:
            self._check(self._library.ps_end_utt(self._decoder))
        return tuple(self._words()) if self._heard_anything() else ()

    def begin(self, speech: Pcm16) -> None:
        """Starts a live utterance. ``speech`` sets the mean of the cepstra: 600 ms of it, without leading silence."""
        self._check(self._library.ps_reinit_feat(self._decoder, None))
        self._check(self._library.ps_activate_search(self._decoder, _PRIMING))
        try:
            self._check(self._library.ps_start_utt(self._decoder))
            self._process(speech, search=False, whole=True)
            self._check(self._library.ps_end_utt(self._decoder))
            if not self._heard_anything():
                self._check(self._library.ps_reinit_feat(self._decoder, None))
        finally:
            self._check(self._library.ps_activate_search(self._decoder, _DICTATION))
        self._check(self._library.ps_start_utt(self._decoder))

    def hear(self, pcm: Pcm16) -> None:
        """Decodes the next piece of a live utterance."""
        self._process(pcm)

    def interim(self) -> str:
        """The words of the live utterance so far; later audio may change them."""
        hypothesis = self._library.ps_get_hyp(self._decoder, ctypes.byref(ctypes.c_int()))
        return (hypothesis or b"").decode()

    def end(self) -> None:
        """Ends a live utterance."""
        self._check(self._library.ps_end_utt(self._decoder))

    def _process(self, pcm: Pcm16, *, search: bool = True, whole: bool = False) -> None:
        if not len(pcm):
            return
        contiguous = np.ascontiguousarray(pcm)
        self._check(
            self._library.ps_process_raw(self._decoder, contiguous.ctypes.data, len(contiguous), not search, whole)
        )

    def _heard_anything(self) -> bool:
        """False where no frame had energy, as in digital silence.

        The mean of the cepstra is over the frames that have some. Over none it is not a number, and the words found
        with it are what happens to be left from the utterance before.
        """
        return b"nan" not in self._library.ps_get_cmn(self._decoder, False)

    def _words(self) -> list[Word]:
        words: list[Word] = []
        first, last = ctypes.c_int(), ctypes.c_int()
        segment = self._library.ps_seg_iter(self._decoder)
        while segment:
            name = self._library.ps_seg_word(segment).decode()
            if not name.startswith(("<", "[", "+")):
                self._library.ps_seg_frames(segment, ctypes.byref(first), ctypes.byref(last))
                text = _ALTERNATE_PRONUNCIATION.sub("", name)
                words.append(Word(text, first.value * FRAME_MS, (last.value + 1) * FRAME_MS))
            segment = self._library.ps_seg_next(segment)
        return words

    @staticmethod
    def _check(status: int) -> None:
        if status < 0:
            raise EngineFailed("the recogniser broke on this audio")
