"""Microphone and loudspeaker, by the sounddevice library (imported on first use), and an echo canceller for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any, Final

import numpy as np
import soxr

from omni_ws.audio.echo import EchoRemover
from omni_ws.audio.pcm import Ducker, SampleLayout, samples_from_bytes
from omni_ws.client.audio import AnswerBuffer, PlaybackBuffer
from omni_ws.core.chunks import AudioFormat
from omni_ws.installing import install_command

#: How long played audio waits at least for the microphone's piece that may contain its echo: the length of a piece.
LEAST_LAG_MS: Final = 20
#: The share of the devices' latency that played audio waits. Half of it hides late callbacks, and is still ahead of the
#: echo.
LAG_SHARE: Final = 0.5
#: If the clocks of the devices differ, played audio piles up. Beyond this it is dropped, and the canceller finds the
#: new delay.
MOST_LAG_MS: Final = 250
#: A piece of which the canceller leaves less than this share of its energy is silenced.
LEFT_OVER: Final = 10 ** (-12 / 10)


class NoEchoCanceller(Exception):
    """Raised if the library is missing, or cannot work at a device's rate; the message says which."""


class EchoBetween:
    """Removes from a microphone's audio the echo of a loudspeaker; both are 16-bit mono.

    Each device calls its method from its own thread, with every piece of audio in order. ``latency_ms`` is the sum of
    the latencies that the devices report. The delay of the echo, up to half a second, is measured. The constructor
    raises NoEchoCanceller.
    """

    def __init__(self, *, microphone_rate: int, loudspeaker_rate: int, latency_ms: float = 0) -> None:
        if microphone_rate % 100:
            raise NoEchoCanceller(f"it does not work at the microphone's rate of {microphone_rate} Hz")
        try:
            self._remover = EchoRemover(microphone_rate, left_over=LEFT_OVER)
        except ImportError:
            raise NoEchoCanceller(f"the library pywebrtc-audio is missing: {install_command('talk')}") from None
        self._resampler = soxr.ResampleStream(loudspeaker_rate, microphone_rate, 1, dtype="int16")
        bytes_per_ms = 2 * microphone_rate // 1000
        self._most_bytes = MOST_LAG_MS * bytes_per_ms
        lag_ms = min(MOST_LAG_MS / 2, max(LEAST_LAG_MS, LAG_SHARE * latency_ms))
        #: Audio that was played and not heard yet, at the rate of the microphone.
        self._played = PlaybackBuffer(prefill_bytes=round(lag_ms) * bytes_per_ms)
        self._listening = False

    def played(self, audio: bytes) -> None:
        """Take the audio that the loudspeaker is given, silence included. Ignored before the first ``heard``."""
        if not self._listening:
            return
        if self._played.buffered_bytes > self._most_bytes:
            self._played.clear()
        self._played.write(self._resampler.resample_chunk(np.frombuffer(audio, "<i2")).tobytes())

    def heard(self, audio: bytes) -> bytes:
        """Return the microphone's audio without the echo."""
        self._listening = True
        near = np.frombuffer(audio, "<i2")
        far = np.frombuffer(self._played.read(len(audio)), "<i2")
        return self._remover.process(near, far).tobytes()


# Microphone and loudspeaker by the sounddevice library, which is imported on first use.


PIECE_MS: Final = 20
#: Recorded audio that waits to be sent; beyond it audio is dropped, as during a long reconnect.
QUEUED_PIECES: Final = 30_000 // PIECE_MS
#: A microphone that gives nothing for this time is gone, or never was there.
DEAD_SEC: Final = 10.0
NO_DEVICE: Final = "this machine has no sound device"

Device = str | int | None


class NoSoundDevice(Exception):
    """Raised if the library or a suitable device is missing; the message says which."""


def sound_library() -> Any:
    try:
        import sounddevice
    except ImportError:
        raise NoSoundDevice(f"microphone and loudspeaker need the extra talk: {install_command('talk')}") from None
    except OSError:
        raise NoSoundDevice(
            "the library PortAudio is not installed (Debian: apt install libportaudio2; Fedora: dnf install portaudio)"
        ) from None
    return sounddevice


def named_device(value: str) -> Device:
    """Return the device that an option names: by its number in the list, or by a part of its name."""
    return int(value) if value.isdecimal() else value


def list_devices() -> str:
    """Return the sound devices as text, one per line. Raises NoSoundDevice."""
    devices = str(sound_library().query_devices())
    if not devices.strip():
        raise NoSoundDevice(NO_DEVICE)
    return devices


def _peak(audio: bytes) -> float:
    return float(np.max(np.abs(samples_from_bytes(audio, SampleLayout.S16)), initial=0))


def _sample_rate(device: Device, kind: str, wanted: int) -> int:
    """Return ``wanted`` if the device supports this rate in Hz, otherwise the device's own rate: the server resamples.

    Raises NoSoundDevice.
    """
    library = sound_library()
    try:
        own = int(library.query_devices(device, kind)["default_samplerate"])
    except (ValueError, library.PortAudioError) as error:
        if not str(library.query_devices()).strip():
            raise NoSoundDevice(NO_DEVICE) from None
        raise NoSoundDevice(f"no {kind} device: {error}; `omni-ws talk --list-devices` shows what there is") from None
    check = library.check_input_settings if kind == "input" else library.check_output_settings
    for rate in (wanted, own):
        try:
            check(device=device, channels=1, dtype="int16", samplerate=rate)
        except (ValueError, library.PortAudioError) as error:
            refusal = error
        else:
            return rate
    raise NoSoundDevice(f"the {kind} device takes no 16-bit mono sound: {refusal}")


class _SoundDevice:
    """Base class of a sound device with 16-bit mono audio.

    ``level`` is the recent peak, from 0 to 1. ``sample_rate`` is the wanted rate in Hz or, if the device does not
    support it, the device's own. The constructor needs a running event loop, and raises NoSoundDevice.
    """

    #: The device's name in messages, its kind in the library, and the library's class of its stream.
    name: str
    kind: str
    stream: str

    def __init__(self, device: Device, sample_rate: int) -> None:
        self.sample_rate = _sample_rate(device, self.kind, sample_rate)
        self.level = 0.0
        #: Removes the loudspeaker's echo from the microphone's audio, in the threads of the devices.
        self._canceller: EchoBetween | None = None
        self._loop = asyncio.get_running_loop()
        self._device = device

    def _open(self, callback: Callable[[Any, int, Any, Any], None], *, piece_ms: int = 0) -> None:
        """Open the device. ``callback`` is called in the device's thread. Raises NoSoundDevice."""
        library = sound_library()
        try:
            self._stream = getattr(library, self.stream)(
                samplerate=self.sample_rate,
                blocksize=self.sample_rate * piece_ms // 1000,
                device=self._device,
                channels=1,
                dtype="int16",
                callback=callback,
            )
        except library.PortAudioError as error:
            raise NoSoundDevice(f"the {self.name} cannot be opened: {error}") from None

    def cancel_echo(self, canceller: EchoBetween) -> None:
        self._canceller = canceller

    def start(self) -> None:
        """Start the device. Raises NoSoundDevice."""
        try:
            self._stream.start()
        except sound_library().PortAudioError as error:
            raise NoSoundDevice(f"the {self.name} cannot be started: {error}") from None

    @property
    def latency_ms(self) -> float:
        """The latency that the device reports, in milliseconds."""
        return float(self._stream.latency) * 1000

    def close(self) -> None:
        self._stream.close()


class MicrophoneDevice(_SoundDevice):
    """A microphone: records pieces of PIECE_MS from ``start`` to ``stop``.

    Pieces beyond QUEUED_PIECES that nobody reads are dropped, and counted in ``dropped_pieces``.
    """

    name, kind, stream = "microphone", "input", "RawInputStream"

    def __init__(self, device: Device = None, *, sample_rate: int = 16_000) -> None:
        super().__init__(device, sample_rate)
        self.dropped_pieces = 0
        self._pieces: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._open(self._recorded, piece_ms=PIECE_MS)

    def _recorded(self, data: Any, frames: int, time: Any, status: Any) -> None:
        piece = bytes(data)
        if self._canceller:
            piece = self._canceller.heard(piece)
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._take, piece)

    def _take(self, piece: bytes) -> None:
        self.level = _peak(piece)
        if self._pieces.qsize() < QUEUED_PIECES:
            self._pieces.put_nowait(piece)
        else:
            self.dropped_pieces += 1

    def stop(self) -> None:
        """Stop recording. ``pieces`` yields the recorded rest, and then ends."""
        self._stream.stop()
        self.level = 0.0
        self._loop.call_soon(self._pieces.put_nowait, None)

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield pieces as they are recorded. Raises NoSoundDevice if none comes for DEAD_SEC: it may be unplugged."""
        while True:
            try:
                async with asyncio.timeout(DEAD_SEC):
                    piece = await self._pieces.get()
            except TimeoutError:
                raise NoSoundDevice(f"the microphone gave nothing for {DEAD_SEC:g} s") from None
            if piece is None:
                return
            yield piece


class LoudspeakerDevice(_SoundDevice):
    """A loudspeaker, started by the constructor: plays the audio in ``buffer``, and silence while there is none."""

    name, kind, stream = "loudspeaker", "output", "RawOutputStream"

    def __init__(self, device: Device = None, *, sample_rate: int = 24_000) -> None:
        super().__init__(device, sample_rate)
        self._idle = asyncio.Event()
        self.buffer = AnswerBuffer(self.sample_rate)
        #: Lowers the volume while it is undecided whether the user interrupts.
        self.ducker = Ducker(AudioFormat(sample_rate=self.sample_rate))
        self._open(self._wanted)
        self.start()

    def _wanted(self, data: Any, frames: int, time: Any, status: Any) -> None:
        audio = self.ducker.apply(self.buffer.read(len(data)))
        data[:] = audio
        self.level = _peak(audio)
        if self._canceller:
            self._canceller.played(audio)
        if self.buffer.idle:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._idle.set)

    async def played(self) -> None:
        """Wait until all audio in ``buffer`` has been played. Call ``buffer.end`` first."""
        self._idle.clear()
        if not self.buffer.idle:
            await self._idle.wait()
        await asyncio.sleep(self.latency_ms / 1000)
