"""What callers say, rendered once and kept in the user's cache; and a recogniser that listens to what they heard.

Voices run in processes of their own, and the recogniser in a thread, all at low priority.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import numpy as np

from omni_ws.audio.pcm import NO_SAMPLES, SampleLayout, Samples, as_samples, mixed_down, resampled, samples_from_bytes
from omni_ws.caller.live_caller import (
    MIC_RATE,
    MIC_TICK,
    levelled,
)
from omni_ws.caller.script import frame_levels, loud_part
from omni_ws.client.audio import UnreadableAudio, read_wav
from omni_ws.config.model import VoiceChoice
from omni_ws.config.values import user_cache_folder
from omni_ws.engine.tts.voice_process import VoiceProcess, espeak_is_here
from omni_ws.errors import EngineFailed, InvalidValue
from omni_ws.scenarios.form import ScenarioUnusable
from omni_ws.weights import (
    fetched_file,
    fetched_folder,
    pinned_weights,
)

#: The mean power of the loud frames of rendered speech, in dBFS.
LEVEL_DB: Final = -22.0
#: What is kept of a rendering around its sound, in ticks.
_BEFORE, _BEHIND = 2, 3
_NICE: Final = 10
_KINDS: Final = {
    "hibari": VoiceChoice.HIBARI,
    "kokoro": VoiceChoice.KOKORO,
    "espeak-ng": VoiceChoice.ESPEAK,
}
_PACKAGES: Final = {"hibari": "hibari-tts", "kokoro": "hibari-tts", "espeak-ng": "espeakng-loader"}
#: The longest piece of sound that the recogniser is given, and where the place to cut it is looked for, in seconds.
_LONGEST_SEC, _CUT_FROM_SEC = 25, 15


@dataclass(frozen=True, slots=True)
class CallersVoice:
    """A voice of callers: its synthesiser, and its name there; None is the first one."""

    kind: str
    name: str | None = None

    @classmethod
    def parse(cls, text: str) -> CallersVoice:
        """Parse ``hibari``, ``kokoro:NAME`` or ``espeak-ng[:NAME]``. Raises ScenarioUnusable."""
        kind, _, name = text.partition(":")
        if kind not in _KINDS:
            raise ScenarioUnusable(f"no voice {text!r}: voices are hibari, kokoro[:NAME] and espeak-ng[:NAME]")
        return cls(kind, name or None)

    @property
    def text(self) -> str:
        return self.kind if self.name is None else f"{self.kind}:{self.name}"

    @property
    def release(self) -> str:
        """What speech depends on beside voice and text."""
        try:
            found = version(_PACKAGES[self.kind])
        except PackageNotFoundError:
            found = "none"
        if self.kind == "espeak-ng":
            return found
        return " ".join([found, *(file.sha256 for file in pinned_weights()[self.kind].files)])


def best_voice() -> CallersVoice:
    """Return the voice of callers that name none. Raises ScenarioUnusable where there is no voice at all."""
    if fetched_folder("kokoro") is not None:
        return CallersVoice("kokoro", "af_heart")
    if fetched_file("hibari") is not None:
        return CallersVoice("hibari")
    if espeak_is_here():
        return CallersVoice("espeak-ng")
    raise ScenarioUnusable("no voice for callers: `omni-ws weights fetch hibari` fetches one, or install espeak-ng")


class CallersSpeech:
    """What callers say. Voices start when something is not in the cache yet."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or user_cache_folder() / "speech"
        self._voices: dict[str, VoiceProcess] = {}
        self._rendering = asyncio.Lock()
        #: What was said or is about to be, so that no file is read while a call goes on.
        self._known: dict[tuple[CallersVoice, str], Samples] = {}
        self._recordings: dict[Path, Samples] = {}
        #: How many texts were rendered, and not found in the cache.
        self.rendered = 0

    async def render(self, said: Iterable[tuple[CallersVoice, str]]) -> None:
        """Render each text that is not in the cache. Raises ScenarioUnusable."""
        for voice, text in said:
            await self.of(voice, text)

    async def of(self, voice: CallersVoice, text: str) -> Samples:
        """Return speech at 16 kHz. Raises ScenarioUnusable."""
        if (known := self._known.get((voice, text))) is not None:
            return known
        file = self._file(voice, text)
        async with self._rendering:
            if not file.exists():
                await asyncio.to_thread(_keep, file, await self._render(voice, text))
                self.rendered += 1
        samples = np.asarray(await asyncio.to_thread(np.load, file), np.float32)
        self._known[voice, text] = samples
        return samples

    def recording(self, path: Path) -> Samples:
        """Return a recording at 16 kHz. Raises ScenarioUnusable."""
        if path not in self._recordings:
            self._recordings[path] = recording(path)
        return self._recordings[path]

    def _file(self, voice: CallersVoice, text: str) -> Path:
        key = "\n".join((voice.text, voice.release, text))
        return self._folder / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.npy"

    async def _render(self, voice: CallersVoice, text: str) -> Samples:
        parts: list[Samples] = []
        try:
            speaker = self._voices.get(voice.kind)
            if speaker is None:
                # What is said is kept before it is needed, however busy the machine is.
                speaker = VoiceProcess(_KINDS[voice.kind], may_stutter=True)
                await speaker.start()
                self._voices[voice.kind] = speaker
                if (pid := speaker.worker_pid) is not None:
                    with suppress(OSError):
                        os.setpriority(os.PRIO_PROCESS, pid, _NICE)
            rate = MIC_RATE
            async for output in speaker.say(text, voice=voice.name):
                rate = output.sample_rate
                parts.append(as_samples(output.samples))
        except (EngineFailed, InvalidValue) as error:
            raise ScenarioUnusable(f"no voice {voice.text}: {error.message}") from None
        samples = resampled(np.concatenate([NO_SAMPLES, *parts]), rate, MIC_RATE)
        try:
            return _trimmed(samples)
        except ValueError:
            raise ScenarioUnusable(f"{voice.text} makes no sound of {text!r}") from None

    async def close(self) -> None:
        """End the voices."""
        for voice in self._voices.values():
            await voice.stop()
        self._voices.clear()


def _trimmed(samples: Samples) -> Samples:
    """Speech at LEVEL_DB, without the silence around it. Raises ValueError if there is no sound."""
    first, end = loud_part(frame_levels(samples, MIC_TICK))
    begin = max(0, (first - _BEFORE) * MIC_TICK)
    speech = levelled(samples, LEVEL_DB)[begin : (end + _BEHIND) * MIC_TICK]
    return np.clip(speech, -1, 1)


def _keep(file: Path, samples: Samples) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f".{os.getpid()}.npy")
    np.save(part, samples)
    part.replace(file)


def recording(path: Path) -> Samples:
    """Read a WAV file as mono at 16 kHz. Raises ScenarioUnusable."""
    try:
        audio = read_wav(path)
    except (OSError, UnreadableAudio) as error:
        raise ScenarioUnusable(f"{path}: {error.strerror if isinstance(error, OSError) else error}") from None
    samples = mixed_down(samples_from_bytes(audio.samples, SampleLayout.S16), audio.channels)
    return resampled(samples, audio.sample_rate, MIC_RATE)


def end_of_speech(samples: Samples) -> tuple[int, int]:
    """Return the ticks in which speech begins, and after which it is over; (0, 0) without sound."""
    try:
        return loud_part(frame_levels(samples, MIC_TICK))
    except ValueError:
        return 0, 0


class Ears:
    """A recogniser of English for what callers heard. It is loaded when it is first needed."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "ears", initializer=_be_nice)
        self._model: object = None

    async def words(self, samples: Samples) -> str:
        """Return the words in sound at 16 kHz. Raises ScenarioUnusable where there is no recogniser."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._words, samples)

    def _words(self, samples: Samples) -> str:
        from omni_ws.engine.asr.whisper import (
            DEFAULT_MODEL,
            WhisperModel,
            whisper_folder,
        )

        if not isinstance(self._model, WhisperModel):
            try:
                self._model = WhisperModel(whisper_folder(DEFAULT_MODEL))
            except EngineFailed as error:
                raise ScenarioUnusable(error.message) from None
        return " ".join(self._model.transcribe(part, words=False).text.strip() for part in _parts(samples))

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


def _be_nice() -> None:
    """Lower the priority of this thread, and of those that it starts (Linux)."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, _NICE)


def _parts(samples: Samples) -> list[Samples]:
    """Cut sound at quiet places into parts that the recogniser can read."""
    parts: list[Samples] = []
    while len(samples) > _LONGEST_SEC * MIC_RATE:
        levels = frame_levels(samples[_CUT_FROM_SEC * MIC_RATE : _LONGEST_SEC * MIC_RATE], MIC_TICK)
        cut = _CUT_FROM_SEC * MIC_RATE + int(np.argmin(levels)) * MIC_TICK
        parts.append(samples[:cut])
        samples = samples[cut:]
    return [*parts, samples] if len(samples) >= MIC_TICK else parts
