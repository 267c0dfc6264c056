"""CompressedStreams: the decoders of the compressed sound of a call, of which a few are open at once."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from omni_ws.audio.codec import AudioDecoder
from omni_ws.audio.pcm import NO_SAMPLES, Samples
from omni_ws.core.chunks import AudioFormat
from omni_ws.errors import OmniError

#: Each open decoder occupies a thread. Answers come one after the other, so that few streams go on at once.
MOST_OPEN: Final = 8


class CompressedStreams:
    """Decodes streams by their names, as their pieces come, to mono samples at ``sample_rate`` (Hz).

    When one more is begun than MOST_OPEN, the one that was left longest is given up.
    """

    def __init__(self, sample_rate: int) -> None:
        self._sample_rate = sample_rate
        #: By name; that which was decoded last at the end.
        self._open: OrderedDict[str, AudioDecoder] = OrderedDict()
        self._ended: set[str] = set()

    def decode(self, stream: str, audio: AudioFormat, data: bytes) -> Samples:
        """Return the samples that ``data`` completes: none of a broken stream, or of one that was given up."""
        if stream in self._ended:
            return NO_SAMPLES
        if stream not in self._open:
            self._open[stream] = AudioDecoder(audio, sample_rate=self._sample_rate)
            if len(self._open) > MOST_OPEN:
                self._end(next(iter(self._open)))
        self._open.move_to_end(stream)
        try:
            return self._open[stream].decode(data)
        except OmniError:
            self._end(stream)
            return NO_SAMPLES

    def close(self) -> None:
        """Release the threads of all decoders."""
        for stream in [*self._open]:
            self._end(stream)

    def _end(self, stream: str) -> None:
        self._ended.add(stream)
        self._open.pop(stream).close()
