"""The server on a machine that has only what `make serve` installs, and Chromium.

What else a machine happens to have must never be why the server works. The PATH has nothing but links to the programs
named here. Libraries that a package may load by name are hidden behind empty files of that name, which the loader of
Linux finds first and refuses. Settings in the environment are gone.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import threading
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import av
import httpx
import pytest
from support.chromium import chromium_path, demo_page
from support.real_models import fetched
from support.speech_clips import WORDS, clip_bytes

from omni_ws.audio.container import wav_header
from omni_ws.client import connect
from omni_ws.scenarios.speech import word_errors

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="only the loader of Linux lets libraries be hidden this way"),
]

#: What the start script of Chromium needs, and Chromium.
PROGRAMS: Final = (
    *("sh", "uname", "grep", "find", "rm", "expr", "tr", "cut", "sed", "dirname", "readlink", "mktemp", "cat"),
    *("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"),
)
LIBRARIES: Final = ("libespeak-ng.so", "libespeak-ng.so.1", "libportaudio.so", "libportaudio.so.2")
CLIP: Final = "goforward"


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process."""
    programs, libraries = tmp_path_factory.mktemp("programs"), tmp_path_factory.mktemp("libraries")
    for name in PROGRAMS:
        if (found := shutil.which(name)) is not None:
            (programs / name).symlink_to(found)
    for name in LIBRARIES:
        (libraries / name).touch()
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OMNI_WS_")}
    path = os.pathsep.join(filter(None, (str(libraries), kept.get("LD_LIBRARY_PATH"))))
    return {**kept, "PATH": str(programs), "LD_LIBRARY_PATH": path, "PYTHONNOUSERSITE": "1"}


def run(bare: dict[str, str], *command: str | Path) -> subprocess.CompletedProcess[str]:
    """What a Python command did."""
    return subprocess.run(
        [sys.executable, *command],
        env=bare,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )


@pytest.fixture(scope="module")
def server(bare: dict[str, str]) -> Iterator[str]:
    """Address of a server that was started without naming its parts; it looks for no model."""
    fetched("whisper-tiny-en")
    fetched("hibari")
    process = subprocess.Popen(
        [sys.executable, "-m", "omni_ws", "serve", "--port", "0", "--engine", "embedded"],
        env=bare,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    said = ""
    try:
        while not (found := re.search(r":(\d+) in a browser", said)):
            line = process.stderr.readline()
            assert line, said
            said += line
        log = threading.Thread(target=process.stderr.read, daemon=True)  # else its log would fill the pipe
        log.start()
        yield f"127.0.0.1:{found[1]}"
        process.terminate()
        assert process.wait() == 0
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.fixture
async def http(server: str) -> Any:
    async with httpx.AsyncClient(base_url=f"http://{server}", timeout=None, trust_env=False) as client:
        yield client


def near(heard: str) -> bool:
    """Whether the words are about those of the recording."""
    words = re.sub(r"[^a-z ]", "", heard.lower().replace("10", "ten"))
    return word_errors(WORDS[CLIP], words).wrong <= 1


def test_what_is_hidden_is_not_found(bare: dict[str, str]) -> None:
    """Else none of these tests is worth anything."""
    script = (
        "import ctypes, shutil, sys\n"
        "assert not any(map(shutil.which, ('flite', 'espeak-ng', 'espeak', 'ffmpeg', 'ffprobe', 'sox', 'python3')))\n"
        "for name in sys.argv[1:]:\n"
        "    try:\n        ctypes.CDLL(name)\n    except OSError:\n        continue\n    sys.exit(name)\n"
    )
    ended = run(bare, "-c", script, *LIBRARIES)
    assert ended.returncode == 0, ended.stderr


async def test_the_parts_are_the_best(http: httpx.AsyncClient) -> None:
    parts = (await http.get("/health")).json()["parts"]
    assert (parts["asr"]["name"], parts["tts"]["name"]) == ("whisper", "hibari")


async def test_a_spoken_question_is_answered_aloud(server: str) -> None:
    async with connect(f"ws://{server}/v1/streaming_input") as session:
        await session.send_audio(clip_bytes(CLIP), end=True)
        answer = await session.answer()
    assert near(answer.transcript)
    assert len(answer.audio) > 24_000


async def test_an_open_microphone_hears_the_end_of_a_turn(server: str) -> None:
    config = {"turn_detection": {"type": "server_vad"}}
    async with connect(f"ws://{server}/v1/streaming_input", config=config) as session:
        await session.send_audio(bytes(8_000) + clip_bytes(CLIP) + bytes(64_000))
        answer = await session.answer()
    assert near(answer.transcript)


@pytest.mark.parametrize("kind", ["mp3", "opus", "ogg", "flac"])
async def test_sound_in_a_format_is_made_and_read_again(kind: str, http: httpx.AsyncClient) -> None:
    body = {"model": "tts-1", "voice": "alloy", "input": "Go forward ten meters.", "response_format": kind}
    made = await http.post("/v1/audio/speech", json=body)
    assert made.status_code == 200, made.text
    container = av.open(io.BytesIO(made.content), mode="r")
    assert sum(len(frame.to_ndarray()[0]) for frame in container.decode(audio=0)) > 8_000
    files = {"file": (f"a.{kind}", made.content)}
    heard = await http.post("/v1/audio/transcriptions", files=files, data={"model": "whisper-1"})
    assert near(heard.json()["text"])


async def test_a_chat_completion_speaks(http: httpx.AsyncClient) -> None:
    body = {
        "model": "any", "modalities": ["text", "audio"], "audio": {"voice": "alloy", "format": "wav"},
        "messages": [{"role": "user", "content": "What is two plus three?"}],
    }  # fmt: skip
    message = (await http.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]
    assert "5" in message["audio"]["transcript"] or "five" in message["audio"]["transcript"]


SPEAK: Final = """
import asyncio
from omni_ws.config.model import VoiceChoice
from omni_ws.engine.tts.voice_process import VoiceProcess

async def main():
    voice = VoiceProcess(VoiceChoice.ESPEAK)
    await voice.start()
    print(sum([len(piece.samples) async for piece in voice.say("Hello")]))
    await voice.stop()

asyncio.run(main())
"""


def test_the_spare_voice_speaks(bare: dict[str, str]) -> None:
    """espeak-ng as a package bundles it, not the machine's."""
    ended = run(bare, "-c", SPEAK)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) > 1000


def test_a_file_is_sent_from_the_command_line(bare: dict[str, str], server: str, tmp_path: Path) -> None:
    spoken, reply = tmp_path / "spoken.wav", tmp_path / "reply.wav"
    audio = clip_bytes(CLIP)
    spoken.write_bytes(wav_header(sample_rate=16_000, channels=1, data_bytes=len(audio)) + audio)
    url = f"ws://{server}/v1/streaming_input"
    ended = run(bare, "-m", "omni_ws", "talk", "--file", spoken, "--fast", "--save", reply, "--url", url)
    assert ended.returncode == 0, ended.stderr
    with wave.open(str(reply)) as file:
        assert file.getnframes() > 12_000


@pytest.mark.asyncio(loop_scope="session")  # of the browser, which tests of the page in this process share
async def test_the_page_is_answered(server: str) -> None:
    chromium_path()
    async with demo_page(tapped=False) as demo:
        await demo.open(f"http://{server}/")
        await demo.write("What is two plus three?")
        assert re.search("5|five", await demo.answered())
