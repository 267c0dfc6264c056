"""LivePlayer: sound and silence on one line, without a clock or a socket."""

from __future__ import annotations

import pytest

from omni_ws.core.chunks import AudioEncoding, AudioFormat
from omni_ws.transport.realtime.live_parts import (
    FRAME_MS,
    LEAD_MS,
    Heard,
    LivePlayer,
)

MU_LAW = AudioFormat(AudioEncoding.PCMU, 8000)
#: Bytes of a millisecond.
MS = 8


class Line:
    """A player, and what it played and told."""

    def __init__(self, *, silence: bool = True, audio: AudioFormat = MU_LAW) -> None:
        self.frames: list[tuple[bytes, float, float]] = []
        self.heard: list[Heard] = []
        self.player = LivePlayer(audio, self._play, self.heard.append, silence=silence)

    def _play(self, audio: bytes, start_ms: float, end_ms: float) -> None:
        assert len(audio) == round((end_ms - start_ms) * MS)
        self.frames.append((audio, start_ms, end_ms))

    @property
    def sound(self) -> bytes:
        return b"".join(audio for audio, _, _ in self.frames)

    def until(self, end_ms: int, *, since: int = 0) -> None:
        for now_ms in range(since + FRAME_MS, end_ms + 1, FRAME_MS):
            self.player.tick(now_ms)


def test_silence_is_exact_and_never_ahead() -> None:
    line = Line()
    line.until(300)
    assert line.frames == [(b"\xff" * 800, begin, begin + 100) for begin in (0, 100, 200)]


def test_sound_begins_at_once_and_is_sent_ahead_by_the_lead_alone() -> None:
    line = Line()
    line.until(100)
    line.player.say("a", b"\x01" * 1000 * MS, 0)
    line.player.pump(130)
    assert line.frames[1:] == [(b"\x01" * 800, 100, 200), (b"\x01" * 800, 200, 300)]
    assert line.player.sent_ms <= 130 + LEAD_MS
    line.player.tick(200)
    assert line.player.sent_ms == 400


def test_a_little_sound_is_sent_when_it_is_due() -> None:
    line = Line()
    line.player.say("a", b"\x01" * 30 * MS, 0)
    line.player.pump(0)
    assert line.frames == [(b"\x01" * 240, 0, 30)]  # nothing was sent before it
    line.player.say("a", b"\x02" * 30 * MS, 30)
    line.player.pump(10)
    assert len(line.frames) == 1  # more may come in time
    line.player.tick(100)
    assert line.frames[1:] == [(b"\x02" * 240, 30, 60), (b"\xff" * 320, 60, 100)]


def test_an_answer_that_runs_dry_goes_on_behind_silence() -> None:
    line = Line()
    line.player.say("a", b"\x01" * 100 * MS, 0)
    line.until(300)
    line.player.say("a", b"\x02" * 100 * MS, 100)
    line.player.finish("a")
    line.until(600, since=300)
    assert line.sound == b"\x01" * 800 + b"\xff" * 1600 + b"\x02" * 800 + b"\xff" * 1600
    assert [(one.position_ms, one.line_ms, one.ended) for one in line.heard] == [
        (100, 100, False),
        (200, 400, False),
        (200, 400, True),
    ]


def test_what_is_heard_is_told_frame_by_frame() -> None:
    line = Line()
    line.player.say("a", b"\x01" * 250 * MS, 0)
    line.player.finish("a")
    line.player.pump(0)
    assert line.player.has("a")
    line.until(400)
    assert [one.position_ms for one in line.heard] == [100, 200, 250, 250]
    assert line.heard[-1].ended
    assert not line.player.has("a")
    assert not line.player.sounding


def test_answers_follow_each_other() -> None:
    line = Line()
    for name, byte in (("a", b"\x01"), ("b", b"\x02")):
        line.player.say(name, byte * 100 * MS, 0)
    line.player.finish("b")
    line.until(300)
    assert line.sound == b"\x01" * 800 + b"\x02" * 800 + b"\xff" * 800
    assert [(one.answer_id, one.ended) for one in line.heard] == [("a", False), ("a", True), ("b", False), ("b", True)]


def test_a_cut_drops_what_was_not_sent() -> None:
    line = Line()
    line.player.say("a", b"\x01" * 1000 * MS, 0)
    line.player.pump(0)
    assert line.player.cut() == []  # more of it may come
    line.until(400)
    assert line.sound == b"\x01" * 1600 + b"\xff" * 1600
    assert [one.position_ms for one in line.heard] == [100, 200]


def test_a_cut_names_the_answers_that_had_no_more_to_come() -> None:
    line = Line()
    line.player.say("a", b"\x01" * 1000 * MS, 0)
    line.player.finish("a")
    assert line.player.cut() == ["a"]


@pytest.mark.parametrize("resumed_ms", [0, 150, 200, 260])
def test_an_answer_that_goes_on_repeats_nothing(resumed_ms: int) -> None:
    """The core sends again what it thinks was not heard; the player knows what was sent."""
    whole = bytes(index // MS % 250 for index in range(500 * MS))
    line = Line()
    line.player.say("a", whole, 0)
    line.player.pump(0)  # 200 ms
    line.player.cut()
    line.until(500)
    line.player.say("a", whole[resumed_ms * MS :], resumed_ms)
    line.player.finish("a")
    line.until(1500, since=500)
    heard = line.sound.replace(b"\xff", b"")
    expected = whole[: 200 * MS] + whole[max(200, resumed_ms) * MS :]
    assert heard == expected
    assert line.heard[-1].position_ms == 500


def test_a_duck_lowers_what_follows() -> None:
    line = Line(audio=AudioFormat(AudioEncoding.PCM16, 4000))  # 8 bytes a millisecond, too
    line.player.say("a", b"\x00\x40" * 2000, 0)
    line.player.duck(True)
    line.player.pump(0)
    assert line.frames[0][0][-2:] != b"\x00\x40"
    line.player.duck(False)
    line.player.tick(100)
    assert line.frames[-1][0][-2:] == b"\x00\x40"


def test_a_law_is_not_lowered() -> None:
    line = Line(audio=AudioFormat(AudioEncoding.PCMA, 8000))
    line.player.duck(True)
    line.player.say("a", b"\x01" * 800, 0)
    line.until(200)
    assert line.sound == b"\x01" * 800 + b"\xd5" * 800


def test_silence_may_be_left_out() -> None:
    line = Line(silence=False)
    line.until(500)
    line.player.say("a", b"\x01" * 800, 0)
    line.player.pump(550)
    line.player.finish("a")
    line.until(800, since=500)
    assert line.frames == [(b"\x01" * 800, 550, 650)]
    assert line.heard[-1].line_ms == 650


def test_nothing_is_sent_to_a_client_that_does_not_read() -> None:
    line = Line()
    for now_ms in (100, 200, 300):
        line.player.tick(now_ms, blocked=True)
    assert not line.frames
    line.player.tick(400)
    assert line.frames == [(b"\xff" * 800, 300, 400)]
