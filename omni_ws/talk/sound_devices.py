"""Microphone and loudspeaker by the sounddevice library, which is imported on first use."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, Final

import numpy as np

from omni_ws.audio.ducking import Ducker
from omni_ws.audio.pcm import SampleLayout, samples_from_bytes
from omni_ws.client.audio import PlaybackBuffer
from omni_ws.core.chunks import AudioFormat
from omni_ws.installing import install_command
from omni_ws.talk.echo import EchoBetween

PIECE_MS: Final = 20
#: Recorded audio that waits to be sent; beyond it audio is dropped, as during a long reconnect.
QUEUED_PIECES: Final = 30_000 // PIECE_MS
PREFILL_MS: Final = 80
#: A microphone that gives nothing for so long is gone, or never was there.
DEAD_SEC: Final = 10.0
NO_DEVICE: Final = "this machine has no sound device"

Device = str | int | None


class NoSoundDevice(Exception):
    """The library or a suitable device is missing; the message tells which."""


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
    """Return the device of an option: a number of the list, or a part of a name."""
    return int(value) if value.isdecimal() else value


def list_devices() -> str:
    """Lists the devices, one per line. Raises NoSoundDevice."""
    devices = str(sound_library().query_devices())
    if not devices.strip():
        raise NoSoundDevice(NO_DEVICE)
    return devices


def _peak(audio: bytes) -> float:
    return float(np.max(np.abs(samples_from_bytes(audio, SampleLayout.S16)), initial=0))


def _sample_rate(device: Device, kind: str, wanted: int) -> int:
    """Returns ``wanted`` if the device supports it, otherwise the device's own rate; the server resamples."""
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


class MicrophoneDevice:
    """Records pieces of PIECE_MS in 16-bit mono. ``level`` is the recent peak, from 0 to 1."""

    def __init__(self, device: Device = None, *, sample_rate: int = 16_000) -> None:
        self.sample_rate = _sample_rate(device, "input", sample_rate)
        self.level = 0.0
        self.dropped_pieces = 0
        #: Takes the echo of the loudspeaker out, in the thread of the device.
        self.canceller: EchoBetween | None = None
        self._loop = asyncio.get_running_loop()
        self._pieces: asyncio.Queue[bytes | None] = asyncio.Queue()
        library = sound_library()
        try:
            self._stream = library.RawInputStream(
                samplerate=self.sample_rate,
                blocksize=self.sample_rate * PIECE_MS // 1000,
                device=device,
                channels=1,
                dtype="int16",
                callback=self._recorded,
            )
        except library.PortAudioError as error:
            raise NoSoundDevice(f"the microphone cannot be opened: {error}") from None

    def _recorded(self, data: Any, frames: int, time: Any, status: Any) -> None:
        piece = bytes(data)
        if self.canceller:
            piece = self.canceller.heard(piece)
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._take, piece)

    def _take(self, piece: bytes) -> None:
        self.level = _peak(piece)
        if self._pieces.qsize() < QUEUED_PIECES:
            self._pieces.put_nowait(piece)
        else:
            self.dropped_pieces += 1

    @property
    def latency_ms(self) -> float:
        """As the device says."""
        return float(self._stream.latency) * 1000

    def start(self) -> None:
        """Starts recording. Raises NoSoundDevice."""
        try:
            self._stream.start()
        except sound_library().PortAudioError as error:
            raise NoSoundDevice(f"the microphone cannot be started: {error}") from None

    def stop(self) -> None:
        """Stops recording. ``pieces`` yields what was recorded, and then ends."""
        self._stream.stop()
        self.level = 0.0
        self._loop.call_soon(self._pieces.put_nowait, None)

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yields what is recorded. Raises NoSoundDevice if nothing is, as of a device that was unplugged."""
        while (piece := await self._next_piece()) is not None:
            yield piece

    async def _next_piece(self) -> bytes | None:
        try:
            async with asyncio.timeout(DEAD_SEC):
                return await self._pieces.get()
        except TimeoutError:
            raise NoSoundDevice(f"the microphone gave nothing for {DEAD_SEC:g} s") from None

    def close(self) -> None:
        self._stream.close()


class LoudspeakerDevice:
    """Plays 16-bit mono samples without gaps."""

    def __init__(self, device: Device = None, *, sample_rate: int = 24_000) -> None:
        self.sample_rate = _sample_rate(device, "output", sample_rate)
        #: The peak of what plays, from 0 to 1.
        self.level = 0.0
        self._loop = asyncio.get_running_loop()
        self._idle = asyncio.Event()
        self.buffer = PlaybackBuffer(prefill_bytes=2 * self.sample_rate * PREFILL_MS // 1000)
        #: Lowers what plays while it is not known whether somebody interrupts it.
        self.ducker = Ducker(AudioFormat(sample_rate=self.sample_rate))
        self.canceller: EchoBetween | None = None
        library = sound_library()
        try:
            self._stream = library.RawOutputStream(
                samplerate=self.sample_rate, device=device, channels=1, dtype="int16", callback=self._wanted
            )
            self._stream.start()
        except library.PortAudioError as error:
            raise NoSoundDevice(f"the loudspeaker cannot be opened: {error}") from None

    def _wanted(self, data: Any, frames: int, time: Any, status: Any) -> None:
        audio = self.ducker.apply(self.buffer.read(len(data)))
        data[:] = audio
        self.level = _peak(audio)
        if self.canceller:
            self.canceller.played(audio)
        if self.buffer.idle:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._idle.set)

    @property
    def latency_ms(self) -> float:
        """As the device says."""
        return float(self._stream.latency) * 1000

    @property
    def played_ms(self) -> float:
        return self.buffer.played_bytes * 1000 / (2 * self.sample_rate)

    async def played(self) -> None:
        """Waits until all audio has been played, up to ``buffer.end``."""
        self._idle.clear()
        if not self.buffer.idle:
            await self._idle.wait()
        await asyncio.sleep(self.latency_ms / 1000)

    def close(self) -> None:
        self._stream.close()
