"""``images``, ``audios`` and ``videos`` of a chat: data URLs, and files below the media root."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import orjson
import pytest
from PIL import Image
from support.live_server import LiveServer, live_server
from support.raw_http import RawResponse, post
from support.scripted_engines import CapableEngine, said

from omni_ws.audio.container import wav_header
from omni_ws.core.chunks import InputChunk, Modality

PATH = "/v1/chat/completions"
GIF = b"GIF89a" + bytes(20)
WAV = wav_header(sample_rate=16_000, channels=1, data_bytes=320) + bytes(320)
USER = {"role": "user", "content": "What is this?"}


def data_url(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A media root with files, and a secret file beside it."""
    folder = tmp_path / "media"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.gif").write_bytes(GIF)
    (folder / "deep" / "b.wav").write_bytes(WAV)
    (folder / "deep" / "c.mp4").write_bytes(b"mp4")
    (folder / "not.png").write_bytes(b"text")
    (folder / "sound.xyz").write_bytes(b"?")
    (folder / "inner.gif").symlink_to(folder / "a.gif")
    (tmp_path / "secret.gif").write_bytes(GIF)
    (folder / "outer.gif").symlink_to(tmp_path / "secret.gif")
    (folder / "loop").symlink_to(folder / "loop")
    (tmp_path / "media2").mkdir()
    (tmp_path / "media2" / "a.gif").write_bytes(GIF)
    return folder


async def ask(server: LiveServer, **body: Any) -> RawResponse:
    return await post(server.port, PATH, {"messages": [USER], **body})


async def test_data_urls_stand_before_the_text() -> None:
    engine = CapableEngine([said("a thing")])
    async with live_server(engine) as server:
        response = await ask(
            server,
            videos=[data_url("video/mp4", b"mp4")],
            audios=[data_url("audio/pcm;rate=8000", bytes(320))],
            images=[data_url("image/gif", GIF)],
        )
    assert response.status == 200
    assert engine.inputs == [
        [
            InputChunk(Modality.IMAGE, GIF, format="image/gif"),
            InputChunk(Modality.AUDIO, bytes(320), format="audio/pcm;rate=8000"),
            InputChunk(Modality.VIDEO, b"mp4", format="video/mp4"),
            InputChunk(Modality.TEXT, b"What is this?"),
        ]
    ]


async def test_files_below_the_root(root: Path) -> None:
    engine = CapableEngine([said("a thing")])
    async with live_server(engine, http={"media_root": root}) as server:
        response = await ask(
            server,
            images=["a.gif", str(root / "a.gif"), "deep/../inner.gif"],
            audios=["deep/b.wav"],
            videos=["deep/c.mp4"],
        )
    assert response.status == 200, response.body
    assert [(chunk.modality, chunk.payload, chunk.format) for chunk in engine.inputs[0][:-1]] == [
        *[(Modality.IMAGE, GIF, None)] * 3,
        (Modality.AUDIO, WAV, "wav"),
        (Modality.VIDEO, b"mp4", None),
    ]


NO_FILES: list[tuple[dict[str, Any], int, str, str]] = [
    ({"images": ["../secret.gif"]}, 400, "invalid_value", "images[0]"),
    ({"images": ["a.gif", "deep/../../secret.gif"]}, 400, "invalid_value", "images[1]"),
    ({"images": ["outer.gif"]}, 400, "invalid_value", "images[0]"),
    ({"images": ["../media2/a.gif"]}, 400, "invalid_value", "images[0]"),
    ({"images": ["/etc/passwd"]}, 400, "invalid_value", "images[0]"),
    ({"images": ["~/a.gif"]}, 400, "invalid_value", "images[0]"),
    ({"images": ["missing.gif"]}, 400, "invalid_value", "images[0]"),
    ({"images": ["loop"]}, 400, "invalid_value", "images[0]"),
    ({"images": ["deep"]}, 400, "invalid_value", "images[0]"),
    ({"images": ["a\0.gif"]}, 400, "invalid_value", "images[0]"),
    ({"images": ["a" * 5000]}, 400, "invalid_value", "images[0]"),
    ({"images": ["not.png"]}, 415, "unsupported_format", "images[0]"),
    ({"audios": ["sound.xyz"]}, 415, "unsupported_format", "audios[0]"),
    ({"images": [""]}, 400, "unsupported_parameter", "images[0]"),
    ({"images": "a.gif"}, 400, "invalid_value", "images"),
    ({"images": [5]}, 400, "invalid_value", "images[0]"),
    ({"images": ["file:///etc/passwd"]}, 400, "unsupported_parameter", "images[0]"),
    ({"images": ["http://127.0.0.1/a.gif"]}, 400, "unsupported_parameter", "images[0]"),
    ({"videos": ["https://example.org/a.mp4"]}, 400, "unsupported_parameter", "videos[0]"),
]


async def test_what_is_no_file_of_ours(root: Path) -> None:
    engine = CapableEngine([])
    async with live_server(engine, http={"media_root": root}) as server:
        for fields, status, code, param in NO_FILES:
            response = await ask(server, **fields)
            assert (response.status, response.error["code"], response.error["param"]) == (status, code, param), fields
            assert engine.requests == [], fields


async def test_what_lies_outside_is_answered_the_same_whether_it_exists_or_not(root: Path) -> None:
    async with live_server(CapableEngine([]), http={"media_root": root}) as server:
        there = await ask(server, images=["../secret.gif"])
        nowhere = await ask(server, images=["../nothing.gif"])
    assert there.body == nowhere.body


async def test_without_a_root_no_file_is_read(root: Path) -> None:
    async with live_server(CapableEngine([])) as server:
        response = await ask(server, images=[str(root / "a.gif")])
    assert (response.status, response.error["code"], response.error["param"]) == (
        400,
        "unsupported_parameter",
        "images[0]",
    )


async def test_files_count_together_against_the_size_of_a_body(root: Path) -> None:
    size = len(GIF)
    async with live_server(CapableEngine([]), http={"media_root": root, "max_body_bytes": 2 * size + 100}) as server:
        body = {"messages": [{"role": "user", "content": "a"}]}
        assert (await post(server.port, PATH, {**body, "images": ["a.gif"]})).status == 200
    async with live_server(CapableEngine([]), http={"media_root": root, "max_body_bytes": 128}) as server:
        (root / "a.gif").write_bytes(b"GIF89a" + bytes(122))
        assert (await post(server.port, PATH, {**body, "images": ["a.gif"]})).status == 200
        (root / "a.gif").write_bytes(b"GIF89a" + bytes(123))
        response = await post(server.port, PATH, {**body, "images": ["a.gif"]})
    assert (response.status, response.error["code"], response.error["param"]) == (413, "payload_too_large", "images[0]")


NO_LIMITS: list[tuple[dict[str, Any], str]] = [
    ({"image_max_pixels": 0}, "image_max_pixels"),
    ({"image_max_pixels": 32 * 1024 * 1024 + 1}, "image_max_pixels"),
    ({"video_max_pixels": 4096 * 2160 + 1}, "video_max_pixels"),
    ({"video_min_pixels": 101, "video_max_pixels": 100}, "video_min_pixels"),
    ({"video_fps": 0}, "video_fps"),
    ({"video_fps": 241}, "video_fps"),
    ({"video_max_frames": 0}, "video_max_frames"),
    ({"video_max_frames": 4097}, "video_max_frames"),
    ({"video_min_frames": 9, "video_max_frames": 8}, "video_min_frames"),
    ({"video_total_pixels": 0}, "video_total_pixels"),
    ({"video_total_pixels": 4096 * 4096 * 2160 + 1}, "video_total_pixels"),
]


async def test_limits_of_media_that_are_none() -> None:
    async with live_server(CapableEngine([])) as server:
        for fields, param in NO_LIMITS:
            response = await ask(server, **fields)
            assert (response.status, response.error["code"], response.error["param"]) == (
                400,
                "invalid_value",
                param,
            ), fields


async def test_limits_of_media_reach_the_engine() -> None:
    engine = CapableEngine([])
    limits = {"image_min_pixels": 100, "image_max_pixels": 100, "video_fps": 0.5}
    limits |= {"video_min_frames": 4096, "video_max_frames": 4096, "video_total_pixels": 4096 * 4096 * 2160}
    async with live_server(engine) as server:
        assert (await ask(server, video_max_pixels=None, **limits)).status == 200
    assert engine.requests[0].options.media_limits == limits


@pytest.mark.slow
async def test_the_embedded_engine_sees_the_smaller_image() -> None:
    from support.embedded_engine import EmbeddedEngine

    buffer = io.BytesIO()
    Image.new("RGB", (640, 480), "red").save(buffer, "png")
    picture = {"images": [data_url("image/png", buffer.getvalue())], "messages": [{"role": "user", "content": ""}]}
    async with live_server(EmbeddedEngine()) as server:
        for limits, size in (({}, "640"), ({"image_max_pixels": 320 * 240}, "320")):
            response = await ask(server, **picture, **limits)
            assert size in response.json()["choices"][0]["message"]["content"]


async def test_media_belong_to_the_users_message() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}
    messages = [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "done"},
    ]
    async with live_server(CapableEngine([])) as server:
        response = await ask(server, messages=messages, images=[data_url("image/gif", GIF)])
        assert (response.status, response.error["param"]) == (400, "images")
        line = b'{"images":["a.gif"]}\n{"text":"a"}\n'
        response = await post(server.port, PATH, line, "X-Streaming-Input: true")
        assert (response.status, response.error["code"], response.error["param"]) == (
            400,
            "unsupported_parameter",
            "images",
        )


async def test_the_fake_engine_counts_no_more_frames_than_may_be_seen() -> None:
    picture = io.BytesIO()
    Image.new("RGB", (2, 2)).save(picture, "png")
    chunk = {"modality": "video", "payload": base64.b64encode(picture.getvalue()).decode()}
    limits = {"video_min_frames": 1, "video_max_frames": 2, "video_total_pixels": 100, "stream": False}
    body = b"\n".join(orjson.dumps(line) for line in (limits, *[chunk] * 3))
    async with live_server() as server:
        response = await post(server.port, "/v1/chat/completions", body, "X-Streaming-Input: true")
    assert "2 video chunks" in response.json()["choices"][0]["message"]["content"]


async def test_the_bytes_of_audio_decide_its_format_whatever_it_is_called(root: Path) -> None:
    engine = CapableEngine([said("a thing")])
    (root / "sound.xyz").write_bytes(WAV)
    data = base64.b64encode(WAV).decode()
    content = [
        {"type": "input_audio", "input_audio": {"data": data, "format": "alac"}},
        {"type": "input_audio", "input_audio": {"data": data, "format": "pcm16"}},
        {"type": "audio_url", "audio_url": {"url": data_url("application/octet-stream", WAV)}},
        {"type": "audio_url", "audio_url": {"url": "data:;base64," + data}},
    ]
    async with live_server(engine, http={"media_root": root}) as server:
        response = await ask(server, messages=[{"role": "user", "content": content}], audios=["sound.xyz"])
    assert response.status == 200, response.body
    assert [(chunk.payload, chunk.format) for chunk in engine.inputs[0]] == [(WAV, "wav")] * 5
