"""What a gateway is sent for the messages of a session, without a socket."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import orjson
import pytest

from omni_ws.audio.pcm import decode_mu_law, encode_mu_law
from omni_ws.core.chunks import AudioEncoding, AudioFormat, FinalChunk, FinishReason, OutputChunk, OutputModality, Usage
from omni_ws.service.conversation.output_log import ServerMessage
from omni_ws.transport.telephony.media_stream import MAX_MARKS, MarkedPlayout
from omni_ws.wire.server_frames import SpeechConfirmedFrame, SpeechDismissedFrame, SpeechStartedFrame

FORMAT = AudioFormat(AudioEncoding.PCMU, 8000)


class Player:
    """A MarkedPlayout, what it sends, and what it reports."""

    def __init__(self) -> None:
        self.reports: list[tuple[str, float]] = []
        self.playout = MarkedPlayout("MZ1", lambda request_id, ms: self.reports.append((request_id, ms)))

    def render(self, *messages: ServerMessage) -> list[tuple[str, Any]]:
        sent: list[tuple[str, Any]] = []
        for message in messages:
            for data in self.playout.render(message):
                fields = orjson.loads(data)
                assert fields["streamSid"] == "MZ1"
                match fields["event"]:
                    case "media":
                        sent.append(("media", base64.b64decode(fields["media"]["payload"])))
                    case "mark":
                        sent.append(("mark", fields["mark"]["name"]))
                    case event:
                        sent.append((event, None))
        return sent


def audio(payload: bytes, *, request: str = "r1", number: int = 7) -> OutputChunk:
    return OutputChunk(
        request_id=request, sequence_id=number, modality=OutputModality.AUDIO, payload=payload, format=FORMAT
    )


def final(request: str = "r1", reason: FinishReason = FinishReason.STOP) -> FinalChunk:
    return FinalChunk(request_id=request, sequence_id=99, finish_reason=reason, usage=Usage())


SPEECH = SpeechStartedFrame(audio_ms=5)
#: It is not known yet whether it interrupts; it does; it does not.
UNCERTAIN = SpeechStartedFrame(audio_ms=5, turn_id="t1", certain=False)
CONFIRMED = SpeechConfirmedFrame(audio_ms=5, turn_id="t1", request_id="r2")
DISMISSED = SpeechDismissedFrame(audio_ms=5, turn_id="t1")
LOUD = encode_mu_law(np.full(1600, 16_384, np.int16))


def level(sent: list[tuple[str, Any]]) -> float:
    """The last sample of audio that was sent, in decibels below LOUD."""
    last = [data for kind, data in sent if kind == "media"][-1]
    return float(20 * np.log10(decode_mu_law(last)[-1] / decode_mu_law(LOUD)[-1]))


def test_audio_goes_out_in_whole_packets_between_marks() -> None:
    sent = Player().render(audio(bytes(100)), audio(b"a" * 100), audio(b"b" * 3201), final())
    assert [kind if kind == "media" else name for kind, name in sent] == [
        *("r1:0", "media", "media", "r1:220", "media", "r1:420", "media", "r1:end"),
    ]
    pieces = [data for kind, data in sent if kind == "media"]
    assert [len(piece) for piece in pieces] == [160, 1600, 1600, 160]
    assert b"".join(pieces) == bytes(100) + b"a" * 100 + b"b" * 3201 + b"\xff" * 119


def test_marks_stand_200_ms_apart_whatever_the_size_of_outputs() -> None:
    sent = Player().render(*[audio(bytes(160))] * 25, final())
    assert [name for kind, name in sent if kind == "mark"] == ["r1:0", "r1:200", "r1:400", "r1:end"]


@pytest.mark.parametrize(("size", "packets"), [(159, 1), (160, 1), (161, 2)])
def test_the_last_packet_is_completed_with_silence(size: int, packets: int) -> None:
    sent = Player().render(audio(b"x" * size), final())
    data = b"".join(data for kind, data in sent if kind == "media")
    assert data == (b"x" * size).ljust(160 * packets, b"\xff")


def test_marks_report_what_was_played() -> None:
    player = Player()
    player.render(audio(bytes(3300)), final())
    for name in ("r1:0", "r1:200", "r1:end"):
        assert player.playout.unplayed
        player.playout.mark_returned(name)
    assert not player.playout.unplayed
    assert player.reports == [("r1", 0), ("r1", 200), ("r1", 3300 / 8)]


def test_a_mark_stands_for_those_before_it_and_unknown_ones_for_nothing() -> None:
    player = Player()
    player.render(audio(bytes(3200)))
    for name in ("r1:400", "r1:400", "r1:0", "else", ""):
        player.playout.mark_returned(name)
    assert player.reports == [("r1", 400)]


def test_two_answers_have_marks_of_their_own() -> None:
    player = Player()
    player.render(audio(bytes(160)), final(), audio(bytes(160), request="r2", number=12), final("r2"))
    player.playout.mark_returned("r2:end")
    assert player.reports == [("r2", 20)]


def test_speech_clears_what_is_not_played_once() -> None:
    player = Player()
    assert player.render(SPEECH) == []
    player.render(audio(bytes(170)))
    assert player.render(SPEECH, final(reason=FinishReason.CANCELLED), SPEECH) == [("clear", None)]
    player.playout.mark_returned("r1:0")
    assert player.reports == []
    player.render(audio(bytes(160), request="r2"), final("r2"))
    player.playout.mark_returned("r2:end")
    assert player.render(SPEECH) == []


def test_while_it_is_not_known_whether_speech_interrupts_the_answer_goes_on_lowered() -> None:
    player = Player()
    assert level(player.render(audio(LOUD))) == 0
    assert player.render(UNCERTAIN) == []
    lowered = player.render(audio(LOUD))
    assert level(lowered) == pytest.approx(-15, abs=0.5)
    assert player.render(DISMISSED) == []
    rest = player.render(audio(LOUD), final())
    assert level(rest) == 0
    pieces = [data for kind, data in [*lowered, *rest] if kind == "media"]
    assert sum(map(len, pieces)) == 2 * len(LOUD)  # no hole


def test_speech_that_does_interrupt_clears_and_the_next_answer_is_at_full_level() -> None:
    player = Player()
    player.render(audio(LOUD), UNCERTAIN)
    assert player.render(CONFIRMED) == [("clear", None)]
    (first,) = [data for kind, data in player.render(audio(LOUD, request="r2", number=12)) if kind == "media"]
    assert first == LOUD


def test_an_answer_that_begins_while_it_is_not_known_is_lowered_from_its_first_sample() -> None:
    player = Player()
    player.render(UNCERTAIN)
    (first,) = [data for kind, data in player.render(audio(LOUD)) if kind == "media"]
    assert 20 * np.log10(decode_mu_law(first)[0] / decode_mu_law(LOUD)[0]) == pytest.approx(-15, abs=0.5)


def test_speech_clears_audio_behind_the_last_mark_that_returned() -> None:
    player = Player()
    player.render(audio(bytes(160)))
    player.playout.mark_returned("r1:0")
    assert player.render(SPEECH) == [("clear", None)]


def test_a_cancelled_answer_is_cleared_without_speech() -> None:
    player = Player()
    player.render(audio(bytes(200)))
    assert player.render(final(reason=FinishReason.CANCELLED)) == [("clear", None)]


def test_an_answer_without_audio_sends_nothing() -> None:
    text = OutputChunk(request_id="r1", sequence_id=0, modality=OutputModality.TEXT, text="hello")
    assert Player().render(text, final()) == []


def test_a_gateway_that_returns_no_marks_costs_no_memory() -> None:
    player = Player()
    player.render(audio(bytes(1600 * (MAX_MARKS + 50))))
    assert len(player.playout._marks) == MAX_MARKS
    player.playout.mark_returned("r1:0")
    assert player.reports == []
