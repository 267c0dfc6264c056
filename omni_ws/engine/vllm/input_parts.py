"""InputParts: adds decoded input to a prompt, each part as soon as it is complete."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from omni_ws.core.chunks import Modality
from omni_ws.core.quota import Room
from omni_ws.engine.decoded_parts import AudioPart, DecodedPart, ImagePart, TextPart, ToolResultPart, VideoPart
from omni_ws.engine.vllm.audio_segments import AudioSegmenter
from omni_ws.engine.vllm.excerpt import Media
from omni_ws.engine.vllm.prompt import PromptDraft
from omni_ws.media.image import PILLOW_BYTES
from omni_ws.media.video import VideoFrame

#: The maximum number of frames of a video in the prompt, spread evenly over it.
VIDEO_FRAMES: Final = 32


class InputParts:
    """Adds the parts of an input to ``draft``: audio at ``sample_rate`` Hz, in segments of the given lengths.

    Parts arrive one after the other, so only the last one is incomplete. The memory of media in the prompt is reserved
    in ``room``.
    """

    def __init__(
        self, draft: PromptDraft, *, sample_rate: int, shortest_segment_ms: int, longest_segment_ms: int, room: Room
    ) -> None:
        self.audio_ms = 0.0
        self._draft = draft
        self._sample_rate = sample_rate
        self._room = room
        self._segment_ms = (shortest_segment_ms, longest_segment_ms)
        self._part: int | None = None
        self._speech: AudioSegmenter | None = None
        self._video: VideoSampler | None = None

    def add(self, decoded: DecodedPart) -> None:
        """Add a piece of decoded input; a new part number completes the part before."""
        if decoded.part != self._part:
            self.close_part()
            self._part = decoded.part
        match decoded:
            case TextPart(text=text, part=part):
                self._draft.add_text(text, part)
            case ToolResultPart(text=text, call_id=call_id):
                self._draft.add_tool_result(call_id, text)
            case AudioPart(samples=samples):
                self.audio_ms += len(samples) * 1000 / self._sample_rate
                if self._speech is None:
                    shortest, longest = self._segment_ms
                    self._speech = AudioSegmenter(self._sample_rate, shortest_ms=shortest, longest_ms=longest)
                self._room.take(samples.nbytes)
                self._add_audio(self._speech.feed(samples))
            case ImagePart(pixels=pixels, part=part):
                self._room.take(PILLOW_BYTES * pixels.size // 3)
                self._draft.add_media(Media(Modality.IMAGE, Image.fromarray(pixels)), part)
            case VideoPart(frames=frames):
                if self._video is None:
                    self._video = VideoSampler(VIDEO_FRAMES, self._room)
                self._video.add(frames)

    @property
    def is_open(self) -> bool:
        """Whether ``close_part`` has anything to complete."""
        return self._speech is not None or self._video is not None

    def close_part(self) -> None:
        """Complete the current part."""
        speech, self._speech = self._speech, None
        video, self._video = self._video, None
        if speech is not None:
            last = speech.finish()
            self._add_audio([] if last is None else [last])
        if video is not None:
            assert self._part is not None
            self._draft.add_media(Media(Modality.VIDEO, video.for_vllm()), self._part)

    def _add_audio(self, segments: Iterable[NDArray[np.float32]]) -> None:
        assert self._part is not None
        for samples in segments:
            self._draft.add_media(Media(Modality.AUDIO, (samples, float(self._sample_rate))), self._part)


class VideoSampler:
    """Selects frames evenly from a video of unknown length.

    It keeps fewer than ``2 * most`` frames and returns at most ``most``. The memory of those kept is reserved in
    ``room``.
    """

    def __init__(self, most: int, room: Room) -> None:
        self._most = most
        self._room = room
        self._every = 1
        self._seen = 0
        self._kept: list[VideoFrame] = []

    def add(self, frames: Iterable[VideoFrame]) -> None:
        """Add frames; drops every other one when too many are kept."""
        for frame in frames:
            if self._seen % self._every == 0:
                self._room.take(frame.pixels.nbytes)
                self._kept.append(frame)
            self._seen += 1
            if len(self._kept) >= 2 * self._most:
                self._room.give(sum(frame.pixels.nbytes for frame in self._kept[1::2]))
                self._kept = self._kept[::2]
                self._every *= 2

    def for_vllm(self) -> tuple[NDArray[np.uint8], dict[str, Any]]:
        """Return the frames, uint8 of shape (frames, height, width, 3), and the metadata that vLLM expects.

        All frames are scaled to the size of the first one.
        """
        step = -(-len(self._kept) // self._most)
        kept = self._kept[::step]
        height, width, channels = kept[0].pixels.shape
        self._room.take(len(kept) * height * width * channels)
        pixels = np.stack(list(_sized(kept, width, height)))
        self._room.give(sum(frame.pixels.nbytes for frame in self._kept))
        self._kept = []
        duration = max(kept[-1].timestamp_ms - kept[0].timestamp_ms, 1) / 1000
        return pixels, {
            "total_num_frames": len(kept),
            "fps": len(kept) / duration,
            "duration": duration,
            "frames_indices": list(range(len(kept))),
            "video_backend": "omni_ws",
            "do_sample_frames": False,
        }


def _sized(frames: Iterable[VideoFrame], width: int, height: int) -> Iterator[NDArray[np.uint8]]:
    for frame in frames:
        if frame.pixels.shape[:2] == (height, width):
            yield frame.pixels
        else:
            yield np.asarray(Image.fromarray(frame.pixels).resize((width, height)), dtype=np.uint8)
