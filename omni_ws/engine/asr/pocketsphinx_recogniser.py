"""PocketSphinxRecogniser: decoders for the utterances under way, and threads that write whole utterances down."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

import numpy as np

from omni_ws.audio.samples import Pcm16
from omni_ws.engine.asr.pocketsphinx_decoder import PRIMING_SAMPLES, PocketSphinxDecoder
from omni_ws.engine.asr.recogniser import Recognised
from omni_ws.engine.asr.utterance import SAMPLE_RATE, Utterance, UtteranceLimits
from omni_ws.engine.loan_pool import LoanPool

#: Threads that load decoders while people already speak.
LOADING_THREADS: Final = 2


class PocketSphinxRecogniser:
    """A Recogniser. ``scribes`` utterances are written down at the same time, each by a decoder of its own.

    ``warm`` decoders for utterances under way are loaded at the start; more are loaded when they are needed, which
    takes half a second each.
    """

    #: Whole utterances are held in memory and decoded in one go.
    limits = UtteranceLimits(cut_after=12 * SAMPLE_RATE, longest=15 * SAMPLE_RATE)

    def __init__(
        self, *, warm: int, scribes: int, load: Callable[[], PocketSphinxDecoder] = PocketSphinxDecoder
    ) -> None:
        #: Decoders for utterances that are read while they are spoken.
        self.live_decoders = LoanPool(load)
        self._warm = warm
        self._load = load
        self._own = threading.local()
        self._scribes_decoders: list[PocketSphinxDecoder] = []
        self._lock = threading.Lock()
        self._scribes = ThreadPoolExecutor(scribes, thread_name_prefix="scribe")
        self._loading = ThreadPoolExecutor(LOADING_THREADS, thread_name_prefix="decoder loader")

    def start(self) -> None:
        """Load what the first speaker needs. Blocks. Raises EngineFailed where recognition cannot work."""
        scribe = self.transcribe(np.zeros(SAMPLE_RATE // 2, np.int16))
        self.live_decoders.fill(1)
        scribe.result()
        self.expect(self._warm)  # the rest comes while people may already speak

    def close(self) -> None:
        """Wait for the running utterances, about a second at most; drop the waiting ones; free all. Idempotent."""
        self._loading.shutdown(cancel_futures=True)
        self._scribes.shutdown(cancel_futures=True)
        while self._scribes_decoders:
            self._scribes_decoders.pop().close()
        self.live_decoders.close()

    def expect(self, talkers: int) -> None:
        if self.live_decoders.loaded < talkers:
            self._loading.submit(self.live_decoders.fill, talkers)

    def live_text(self) -> PocketSphinxLiveText:
        return PocketSphinxLiveText(self.live_decoders)

    def transcribe(self, pcm: Pcm16, *, waited_for: bool = True) -> Future[Recognised]:
        return self._scribes.submit(self._transcribe, pcm)

    def _transcribe(self, pcm: Pcm16) -> Recognised:
        decoder: PocketSphinxDecoder | None = getattr(self._own, "decoder", None)
        if decoder is None:
            decoder = self._own.decoder = self._load()
            with self._lock:
                self._scribes_decoders.append(decoder)
        words = decoder.transcribe(pcm)
        return Recognised(" ".join(word.text for word in words), words)


class PocketSphinxLiveText:
    """A LiveText: decodes what is new of an utterance, with a decoder that it borrows meanwhile."""

    def __init__(self, decoders: LoanPool[PocketSphinxDecoder]) -> None:
        self._decoders = decoders
        self._decoder: PocketSphinxDecoder | None = None
        #: The samples of the utterance that were decoded.
        self._decoded = 0

    def read(self, utterance: Utterance) -> str | None:
        if self._decoder is None:
            if utterance.length - utterance.lead < PRIMING_SAMPLES:
                return None
            # The stream goes on while a decoder is being loaded; what was said meanwhile is made up for.
            self._decoder = self._decoders.borrow_ready()
            if self._decoder is None:
                return None
            self._decoded = 0
            self._decoder.begin(utterance.pcm(utterance.lead, utterance.lead + PRIMING_SAMPLES))
        self._decoder.hear(utterance.pcm(start=self._decoded))
        self._decoded = utterance.length
        return self._decoder.interim()

    def end(self) -> None:
        decoder, self._decoder = self._decoder, None
        if decoder is not None:
            decoder.end()
            self._decoders.give_back(decoder)
