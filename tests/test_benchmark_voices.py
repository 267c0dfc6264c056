"""What the benchmark of voice servers makes of their wires and of what it hears."""

from __future__ import annotations

import base64
import json
from array import array

import pytest
from websockets.asyncio.server import ServerConnection, serve

from benchmarks.embedded import Clip
from benchmarks.voice_client import (
    ANSWER_RATE,
    BETWEEN_ANSWERS_SEC,
    OmniWire,
    Player,
    ProtobufWire,
    RawWire,
    converse,
    turns_of,
)

SILENCE = bytes(2 * ANSWER_RATE // 10)
SOUND = array("h", [1000] * (ANSWER_RATE // 10)).tobytes()


def test_pipecats_frames_are_those_of_its_definition() -> None:
    # A Frame whose field 2 is an AudioRawFrame: field 3 the samples, 4 the rate, 5 the channels (its frames.proto).
    assert ProtobufWire().encode(b"ab", 7) == b"\x12\x09\x1a\x02ab\x20\x80\x7d\x28\x01"


@pytest.mark.parametrize("size", [2, 126, 128, 640, 40_000])
def test_pipecats_audio_is_read_whatever_stands_beside_it(size: int) -> None:
    wire = ProtobufWire()
    samples = bytes(range(256)) * (size // 256) + bytes(size % 256)
    assert wire.audio(wire.encode(samples, 0)) == samples
    # With an id and a name before the samples, as its own serializer has them; and a frame that is text.
    inner = b"\x08\x96\x01\x12\x03out\x1a\x04abcd\x20\xc0\xbb\x01"
    assert wire.audio(bytes((0x12, len(inner))) + inner) == b"abcd"
    assert wire.audio(b"\x0a\x03\x1a\x01a") == b""


def test_our_frames() -> None:
    wire = OmniWire({"type": "server_vad"})
    assert json.loads(wire.opening()[0])["turn_detection"] == {"type": "server_vad"}
    chunk = json.loads(wire.encode(b"ab", 3))
    assert (chunk["sequence_id"], base64.b64decode(chunk["payload"])) == (3, b"ab")
    spoken = {"type": "output_chunk", "modality": "audio", "payload": base64.b64encode(b"cd").decode()}
    assert wire.audio(json.dumps(spoken)) == b"cd"
    assert wire.audio(json.dumps({"type": "output_chunk", "modality": "text", "payload": "cd"})) == b""
    with pytest.raises(RuntimeError, match="refused"):
        wire.audio(json.dumps({"type": "error", "code": "invalid_value"}))


def test_a_player_hears_the_first_sound_behind_the_silence_that_is_played_before() -> None:
    player = Player()
    player.add(SILENCE, 10.0)
    player.add(SOUND, 10.01)  # Sent ahead: played when the silence is over.
    player.add(SOUND, 10.9)  # Late, but of the same answer.
    assert player.arrived == [10.0]
    assert player.heard == pytest.approx([10.1])


@pytest.mark.parametrize(("pause", "answers"), [(BETWEEN_ANSWERS_SEC, 1), (BETWEEN_ANSWERS_SEC + 0.01, 2)])
def test_a_pause_parts_answers(pause: float, answers: int) -> None:
    player = Player()
    player.add(SOUND, 10.0)
    player.add(SOUND, 10.1 + pause)
    assert len(player.arrived) == len(player.heard) == answers


def test_turns_without_an_answer_and_with_one_too_early_are_told() -> None:
    player = Player(arrived=[5.5, 11.0, 21.5], heard=[5.6, 11.1, 21.6])
    answered, early, unanswered = turns_of([(3.0, 5.0, 9.0), (10.0, 12.0, 19.0), (30.0, 32.0, 39.0)], player)
    assert (answered.arrived, answered.early) == (0.5, False)
    assert answered.heard == pytest.approx(0.6)
    assert (early.arrived, early.heard, early.early) == (None, None, True)
    assert (unanswered.arrived, unanswered.early) == (None, False)


@pytest.mark.slow
async def test_a_server_that_answers_at_the_end_of_speech_is_measured_so() -> None:
    clip = Clip.load("cards_001")
    speech_ends_with = round((0.5 + clip.speech[1]) / 0.02)

    async def answer(connection: ServerConnection) -> None:
        pieces = 0
        async for message in connection:
            assert len(message) == 640
            pieces += 1
            if pieces == speech_ends_with:
                await connection.send(SILENCE + SOUND)

    async with serve(answer, "127.0.0.1", 0) as server:
        # Most of the turn is time that a busy machine may take.
        (turn,) = await converse(server.sockets[0].getsockname()[1], RawWire(), [clip], 6.0)
    assert not turn.early
    assert turn.arrived is not None
    assert turn.heard is not None
    assert turn.heard - turn.arrived == pytest.approx(0.1)


async def test_a_server_that_hangs_up_is_told() -> None:
    async def hang_up(connection: ServerConnection) -> None:
        await connection.recv()

    async with serve(hang_up, "127.0.0.1", 0) as server:
        with pytest.raises(RuntimeError, match="ended a session"):
            await converse(server.sockets[0].getsockname()[1], RawWire(), [Clip.load("cards_001")], 2.0)


async def test_a_clip_that_does_not_fit_into_its_turn_is_refused() -> None:
    async with serve(lambda connection: connection.wait_closed(), "127.0.0.1", 0) as server:
        with pytest.raises(ValueError, match="does not fit"):
            await converse(server.sockets[0].getsockname()[1], RawWire(), [Clip.load("cards_001")], 1.5)
