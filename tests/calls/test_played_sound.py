"""When what was played and spoken, from what was sent, reported and cut: by hand, to the millisecond."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from support.call_sound import RATE, tracks
from support.speech_clips import as_pcm16

from omni_ws.calls.files import describe
from omni_ws.calls.lines import CallLines
from omni_ws.calls.played_sound import LOOK_AHEAD_MS, Microphone, PlayedSound, SoundPiece, least_ahead
from omni_ws.calls.reading import CallReading
from omni_ws.wire.recording import EndedLine, HeaderLine, OpenedLine, ReceivedLine, RecordedLine, SentLine, encode_line


def spans(pieces: list[SoundPiece]) -> list[tuple[float, float]]:
    """From when to when something sounds; pieces that follow one another are one."""
    found: list[list[float]] = []
    for piece in pieces:
        if found and abs(piece.start_ms - found[-1][1]) < 0.001:
            found[-1][1] = piece.end_ms
        else:
            found.append([piece.start_ms, piece.end_ms])
    return [(start, end) for start, end in found]


def test_answers_play_one_after_the_other() -> None:
    speaker = PlayedSound()
    for index in range(10):
        speaker.send("a", 1000, 100, index)
    speaker.send("b", 1200, 500, 10)
    assert spans(speaker.pieces()) == [(1000, 2500)]
    assert speaker.streaks[1].heard[0].start_ms == 2000


def test_sound_that_is_late_leaves_a_pause() -> None:
    speaker = PlayedSound()
    speaker.send("a", 1000, 100, 0)
    speaker.send("a", 1400, 100, 1)
    speaker.send("a", 1410, 100, 2)
    assert spans(speaker.pieces()) == [(1000, 1100), (1400, 1600)]


def test_the_report_with_the_least_delay_tells_when_an_answer_began() -> None:
    speaker = PlayedSound()
    speaker.send("a", 1000, 3000, 0)
    for played, delay in ((200, 90), (400, 3), (600, 250), (800, 40)):
        speaker.report("a", 1150 + played + delay, played)
    assert spans(speaker.pieces()) == [(1153, 4153)]


@pytest.mark.parametrize("seed", range(20))
def test_jitter_of_the_network_moves_nothing(seed: int) -> None:
    """Delays of 40 ms on average, with a long tail: a minute of an answer, and of speech."""
    random = np.random.default_rng(seed)
    speaker, microphone = PlayedSound(), Microphone()
    for index in range(600):
        speaker.send("a", 1000 + 100 * index - (500 if index > 5 else 100 * index), 100, index)
    at = 0.0
    for played in range(200, 60_000, 200):
        at = max(at, 1080 + played + random.exponential(40))
        speaker.report("a", at, played)
    [(begins, ends)] = spans(speaker.pieces())
    assert begins == pytest.approx(1080, abs=5)
    assert ends - begins == pytest.approx(60_000)
    at = 0.0
    for index in range(3000):
        at = max(at, 20 * (index + 1) + random.exponential(40))
        microphone.add(at, 20, index)
    late = [piece.start_ms - 20 * piece.ref for piece in microphone.pieces()]
    assert min(late) > -1
    assert max(late) < 15


def test_a_report_at_the_end_of_what_was_sent_tells_nothing() -> None:
    speaker = PlayedSound()
    speaker.send("a", 1000, 500, 0)
    speaker.report("a", 1900, 500)  # 400 ms after it was over
    assert spans(speaker.pieces()) == [(1000, 1500)]


def test_a_client_that_runs_dry_goes_on_later() -> None:
    speaker = PlayedSound()
    speaker.send("a", 1000, 1000, 0)
    speaker.report("a", 1500, 500)
    speaker.send("a", 2300, 1000, 1)
    speaker.report("a", 2350 + 400, 1400)  # it began again at 2350
    assert spans(speaker.pieces()) == [(1000, 2000), (2350, 3350)]


@pytest.mark.parametrize("reported", [None, 1180.0])
def test_a_cut_ends_where_the_client_says_or_at_its_time(reported: float | None) -> None:
    speaker = PlayedSound()
    speaker.send("a", 1000, 3000, 0)
    speaker.report("a", 1500, 500)
    speaker.silence(2200)
    if reported is not None:
        speaker.report("a", 2230, reported)
    speaker.send("b", 2500, 100, 1)
    ends = 2200 if reported is None else 1000 + reported
    assert spans(speaker.pieces()) == [(1000, ends), (2500, 2600)]
    assert speaker.streaks[0].cut_ms == ends - 1000


def test_an_answer_that_was_held_goes_on_where_it_was_heard() -> None:
    speaker = PlayedSound()
    speaker.send("a", 1000, 2000, 0, 0.0)
    speaker.report("a", 1500, 500)
    speaker.silence(1800)
    speaker.report("a", 1810, 800)
    speaker.send("a", 3000, 1200, 1, 800.0)
    speaker.report("a", 3100 + 300, 1100)
    assert spans(speaker.pieces()) == [(1000, 1800), (3100, 4300)]
    assert speaker.streaks[-1].time_of(900) == 3200


def test_what_waits_behind_a_cut_answer_is_not_heard() -> None:
    speaker = PlayedSound()
    speaker.send("a", 1000, 2000, 0)
    speaker.send("b", 1100, 500, 1)
    speaker.silence(1500)
    assert spans(speaker.pieces()) == [(1000, 1500)]
    assert speaker.streaks[1].heard == []


def test_a_cut_of_one_answer_lets_the_next_play() -> None:
    speaker = PlayedSound()
    speaker.send("a", 1000, 2000, 0)
    speaker.send("b", 1100, 500, 1)
    speaker.cut("a", 1500)
    assert spans(speaker.pieces()) == [(1000, 2000)]
    assert speaker.streaks[1].heard[0].start_ms == 1500


def test_speech_is_where_it_was_spoken_although_it_arrives_late() -> None:
    microphone = Microphone()
    for index, delay in enumerate((40, 5, 90, 60, 5)):
        microphone.add(1000 + 20 * (index + 1) + delay, 20, index)
    microphone.add(5020, 20, 5)  # after a pause
    assert spans(microphone.pieces()) == [(1005, 1105), (5000, 5020)]
    assert microphone.time_of(50) == 1055
    assert microphone.time_of(110) == 5010


@pytest.mark.parametrize("faster", [1e-4, -1e-4, 5e-4])
def test_a_microphone_whose_clock_differs_stays_where_it_is(faster: float) -> None:
    microphone = Microphone()
    for index in range(30_000):  # ten minutes
        microphone.add(20 * (index + 1) * (1 - faster) + (index % 7), 20, index)
    late = [piece.start_ms - 20 * piece.ref * (1 - faster) for piece in microphone.pieces()]
    assert min(late) > -12
    assert max(late) < 15
    assert microphone.time_of(300_000) == pytest.approx(300_000 * (1 - faster), abs=15)


def test_speech_in_another_order_and_twice() -> None:
    microphone = Microphone()
    for index in (0, 2, 1, 1, 3):
        microphone.add(1100, 20, index, index)
    assert [piece.ref for piece in microphone.pieces()] == [0, 1, 2, 3]
    assert microphone.total_ms == 80  # what was repeated is in it once
    assert spans(microphone.pieces()) == [(1020, 1100)]


def test_a_short_word_at_the_begin_is_where_it_was_spoken() -> None:
    microphone = Microphone()
    microphone.add(200, 50, 0)
    assert spans(microphone.pieces()) == [(150, 200)]
    assert Microphone().pieces() == []
    assert Microphone().time_of(10) is None


def test_a_file_at_once_is_heard_from_its_arrival_on() -> None:
    microphone = Microphone()
    for index in range(100):
        microphone.add(10, 100, index)
    assert spans(microphone.pieces()) == [(0, 10_000)]


def test_least_ahead_looks_no_further_than_its_limit() -> None:
    at = np.array([0.0, LOOK_AHEAD_MS, LOOK_AHEAD_MS + 1])
    assert least_ahead(at, np.array([3.0, 2.0, 1.0])).tolist() == [2.0, 1.0, 1.0]
    rng = np.random.default_rng(1)
    times, offsets = np.sort(rng.uniform(0, 40_000, 300)), rng.normal(0, 100, 300)
    wanted = [offsets[(times >= when) & (times <= when + LOOK_AHEAD_MS)].min() for when in times]
    assert least_ahead(times, offsets).tolist() == wanted


# lines of a recording, by hand

HEADER = HeaderLine(
    recording="omni_ws",
    version=1,
    kind="websocket",
    id="sess_1",
    server="1",
    engine="e",
    model="m",
    started="2026-01-01T00:00:00.000+00:00",
    payloads=True,
)


def written(folder: Path, *events: RecordedLine, **header: Any) -> CallReading:
    from msgspec import structs

    path = folder / "20260101T000000_sess_1.ndjson"
    head = structs.replace(HEADER, **header)
    lines = (OpenedLine(at=0, connection=0, target="/v1/streaming_input"), *events, EndedLine(at=9000))
    path.write_bytes(b"".join(map(encode_line, (head, *lines))))
    return CallReading(CallLines(path))


def out(at: float, **frame: Any) -> SentLine:
    return SentLine(at=at, connection=0, text=orjson.dumps(frame).decode())


def got(at: float, **frame: Any) -> ReceivedLine:
    return ReceivedLine(at=at, connection=0, text=orjson.dumps(frame).decode())


def tone(ms: int) -> str:
    return base64.b64encode(as_pcm16(np.full(RATE * ms // 1000, 0.5, np.float32))).decode()


def said(at: float, ms: int, number: int, start_ms: int = 0, request: str = "req_1") -> SentLine:
    fields = {"request_id": request, "sequence_id": number, "modality": "audio", "start_ms": start_ms}
    return out(at, type="output_chunk", **fields, payload=tone(ms), format="pcm16", sample_rate=RATE)


def level(samples: Any, begin_ms: float, end_ms: float) -> float:
    part = samples[int(begin_ms * RATE / 1000) : int(end_ms * RATE / 1000)]
    loud = float(np.sqrt(np.mean(np.square(part, dtype=np.float64))))
    return round(20 * float(np.log10(max(1e-6, loud) / 0.5)), 1)


def test_a_client_that_lowers_its_sound_is_heard_lower(tmp_path: Path) -> None:
    reading = written(
        tmp_path,
        said(1000, 4000, 0),
        out(2000, type="speech_started", audio_ms=0, certain=False, turn_id="turn_1"),
        out(2500, type="speech_dismissed", audio_ms=0, turn_id="turn_1"),
        out(3000, type="speech_started", audio_ms=0, certain=False, turn_id="turn_2"),
        out(3300, type="speech_confirmed", audio_ms=0, turn_id="turn_2", request_id="req_2"),
    )
    _, right, rate = tracks(reading.lines)
    assert rate == RATE
    assert level(right, 1000, 2000) == 0
    assert level(right, 2010, 2500) == -15
    assert level(right, 2510, 3000) == 0
    assert level(right, 3010, 3300) == -15
    assert level(right, 3300, 4000) < -60
    assert level(right, 0, 1000) < -60


@pytest.mark.parametrize("interrupts", [True, False])
def test_speech_stops_the_sound_unless_it_does_not_interrupt(tmp_path: Path, interrupts: bool) -> None:
    reading = written(
        tmp_path,
        out(0, type="session_updated", turn_detection={"type": "server_vad", "interrupt_response": interrupts}),
        said(1000, 2000, 0),
        out(2000, type="speech_started", audio_ms=0, turn_id="turn_1", request_id="req_2"),
    )
    _, right, _ = tracks(reading.lines)
    assert (level(right, 2000, 3000) == 0) is not interrupts


def test_words_of_a_button_stand_where_they_were_said(tmp_path: Path) -> None:
    """Whether the request begins while it is said or, as here, behind its end; and however long the turns lie apart."""
    words = [{"text": "Go", "start_ms": 0, "end_ms": 200}, {"text": "on.", "start_ms": 300, "end_ms": 400}]
    lines: list[RecordedLine] = []
    for turn, begin in enumerate((1000, 5000)):
        for piece in range(4):
            chunk = {"sequence_id": 5 * turn + piece, "modality": "audio", "payload": tone(100)}
            lines.append(got(begin + 100 * (piece + 1), type="input_chunk", **chunk))
        lines.append(got(begin + 450, type="input_chunk", sequence_id=5 * turn + 4, end_of_input=True))
        named: dict[str, Any] = {"request_id": f"req_{turn}", "sequence_id": 5 * turn + 4}
        lines.append(out(begin + 460, type="response_started", trigger="end_of_input", **named))
        named["sequence_id"] = turn
        lines.append(out(begin + 470, type="output_chunk", modality="transcript", text="Go on.", words=words, **named))
    turns = describe(written(tmp_path, *lines))["turns"]
    found = [[word["start_ms"] for word in turn["user"]["words"]] for turn in turns]
    assert found == [pytest.approx(times, abs=0.1) for times in ([1000, 1300], [5000, 5300])]
    whole = [[turn["user"][name] for name in ("start_ms", "end_ms")] for turn in turns]
    assert whole == [pytest.approx(times, abs=0.1) for times in ([1000, 1400], [5000, 5400])]


def test_outputs_that_a_resume_repeats_sound_once(tmp_path: Path) -> None:
    reading = written(tmp_path, said(1000, 500, 0), said(1400, 500, 1, 500), said(1600, 500, 1, 500))
    _, right, _ = tracks(reading.lines)
    assert level(right, 1000, 2000) == 0
    assert level(right, 2001, 3000) < -60


def test_an_end_of_speech_that_a_resume_repeats_was_told_when_it_was(tmp_path: Path) -> None:
    spoken = {"turn_id": "turn_1", "request_id": "req_1"}
    chunk = {"sequence_id": 0, "modality": "audio", "payload": tone(500)}
    stops = [out(at, type="speech_stopped", audio_ms=400, **spoken) for at in (700, 9000)]
    started = out(200, type="speech_started", audio_ms=100, **spoken)
    answer = [out(9100, type="response_started", **spoken), said(9200, 500, 0)]
    reading = written(tmp_path, started, got(600, type="input_chunk", **chunk), *stops, *answer)
    assert describe(reading)["turns"][0]["times"]["turn_decided"] == 700


def test_a_backchannel_sounds_beside_an_answer(tmp_path: Path) -> None:
    murmur = {"type": "backchannel", "turn_id": "t", "text": "mm", "payload": tone(200), "format": "pcm16"}
    reading = written(tmp_path, out(500, **murmur, sample_rate=RATE), out(1500, **murmur, sample_rate=RATE))
    _, right, _ = tracks(reading.lines)
    assert [level(right, begin, begin + 200) for begin in (500, 700, 1500)] == [0, -114, 0]


@pytest.mark.parametrize(
    "broken",
    [
        "[]",
        "{",
        '{"type":5,"payload":{}}',
        '{"type":"output_chunk","request_id":[],"sequence_id":"x","words":[{}],"modality":"audio","payload":"%"}',
        '{"type":"speech_started","audio_ms":"x","turn_id":7}',
        '{"event":"media","media":"x"}',
        '{"event":"mark","mark":[]}',
        '{"type":"session.created","session":{"audio":{"input":3,"output":{"format":{"type":"audio/pcm","rate":"x"}}}}}',
        '{"type":"response.done","response":[]}',
        '{"type":"input_audio_buffer.append","audio":{"a":1}}',
    ],
)
@pytest.mark.parametrize("kind", ["websocket", "realtime", "live", "telephony", "webrtc", "wyoming"])
def test_messages_that_mean_nothing_are_passed_over(tmp_path: Path, kind: str, broken: str) -> None:
    lines = (SentLine(at=10, connection=0, text=broken), ReceivedLine(at=20, connection=0, text=broken))
    binary = (SentLine(at=30, connection=0, binary=b"x"), ReceivedLine(at=30, connection=0, bad_text=b"\xff"))
    reading = written(tmp_path, *lines, *binary, kind=kind)
    assert reading.ended
    assert orjson.dumps(describe(reading))


def test_a_recording_that_breaks_off_is_read_to_there(tmp_path: Path) -> None:
    path = written(tmp_path, said(1000, 500, 0)).lines.path
    path.write_bytes(path.read_bytes()[:-5])
    call = describe(CallReading(CallLines(path)))
    assert call["recorded"]["complete"] is False
    assert call["sound"]["duration_ms"] == 1500


def test_a_call_of_realtime_is_cut_where_its_client_says(tmp_path: Path) -> None:
    delta = {"type": "response.output_audio.delta", "response_id": "resp_1", "item_id": "item_1"}
    reading = written(
        tmp_path,
        out(1000, **delta, delta=tone(3000)),
        got(2500, type="conversation.item.truncate", item_id="item_1", content_index=0, audio_end_ms=1200),
        kind="realtime",
    )
    _, right, _ = tracks(reading.lines)
    assert [level(right, 1000, 2200), level(right, 2201, 4000)] == [0, -114]
