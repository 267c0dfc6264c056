"""``make serve-tiny``, and what a newcomer does with it: microphone client, the README's curl lines, OpenAI's SDK."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import resource
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import wave
from base64 import b64decode
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import av
import pytest
from support.live_server import live_server
from support.patience import PATIENCE_SEC

from omni_ws.config import EngineName, load
from omni_ws.engine_choice import create_engine

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

ROOT = Path(__file__).parents[3]
CLIP = ROOT / "tests" / "data" / "goforward.wav"
README_ADDRESS = "http://127.0.0.1:8080"
#: What the models' configuration allows an answer where the client says nothing, in tokens.
LONGEST = 40
#: The CPU time of a stop, for each of both models. It takes 1.1 s with one; tearing down a process of vLLM by itself
#: takes Python 4 s and more.
IDLE_STOP_CPU_SEC = 2.5


class Listening(NamedTuple):
    address: str
    #: Of token sessions.
    grpc_port: int


def make(target: str, *variables: str) -> list[str]:
    """The command for a make target in this very environment, whose stamp counts as fresh."""
    stamp = f"{sys.prefix}/.ready"
    return ["make", "--no-print-directory", "-o", stamp, target, f"VLLM_VENV={sys.prefix}", *variables]


def environment() -> dict[str, str]:
    """Without what a make above this one says, and without the folder of sockets of models in this process."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "ARGS"))}
    for name in ("OMNI_WS_API_KEY", "VLLM_RPC_BASE_PATH"):
        kept.pop(name, None)
    return kept


def recipe(target: str, *variables: str) -> list[list[str]]:
    """The commands that a make target would run, in words."""
    command = [*make(target, *variables), "--dry-run"]
    ended = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=True)
    return [shlex.split(line) for line in ended.stdout.replace("\\\n", " ").splitlines()]


@contextmanager
def made(target: str, *variables: str) -> Iterator[subprocess.Popen[str]]:
    """The server that a make target runs."""
    process = subprocess.Popen(
        make(target, *variables), cwd=ROOT, env=environment(), stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stderr is not None
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        process.stderr.close()


def listening(process: subprocess.Popen[str]) -> Listening:
    """Once it does."""
    assert process.stderr is not None
    said = ""
    for line in process.stderr:
        said += line
        if tokens := re.search(r"\(gRPC\) listens on \S+:(\d+)", line):
            address = re.search(r"listens on (http://\S+)", said)
            assert address is not None
            return Listening(address[1], int(tokens[1]))
    pytest.fail(f"the server did not start:\n{said}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny-models")


@pytest.fixture(scope="module")
def process(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """``make serve-tiny``."""
    with made("serve-tiny", f"TINY_MODELS={folder}", "ARGS=--port 0 --grpc-port 0") as process:
        yield process


@pytest.fixture(scope="module")
def server(process: subprocess.Popen[str]) -> Listening:
    return listening(process)


@pytest.fixture(scope="module")
def address(server: Listening) -> str:
    return server.address


@pytest.fixture(scope="module")
def grpc_port(server: Listening) -> int:
    return server.grpc_port


def talk(address: str, *arguments: str) -> list[dict[str, Any]]:
    url = address.replace("http", "ws", 1) + "/v1/streaming_input"
    program = [sys.executable, "-m", "omni_ws", "talk", "--url", url, "--json", *arguments]
    ended = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_SEC, check=False)
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


def seconds_of(wav: bytes | Path) -> float:
    with wave.open(io.BytesIO(wav) if isinstance(wav, bytes) else str(wav)) as file:
        assert max(file.readframes(file.getnframes())) > 0
        seconds: float = file.getnframes() / file.getframerate()
        return seconds


def test_talk_with_a_recording(address: str, tmp_path: Path) -> None:
    reply = tmp_path / "reply.wav"
    events = talk(address, "--file", str(CLIP), "--save", str(reply))
    final = final_of(events)
    assert final["usage"]["input_audio_ms"] == pytest.approx(seconds_of(CLIP) * 1000, abs=20)
    assert final["usage"]["output_tokens"] == LONGEST
    assert final["usage"]["output_audio_ms"] == pytest.approx(seconds_of(reply) * 1000, abs=1)


def test_talk_with_a_text(address: str, tmp_path: Path) -> None:
    reply = tmp_path / "reply.wav"
    assert text_of(talk(address, "--text", "Hello!", "--save", str(reply)))
    assert seconds_of(reply) > 0


async def test_an_omni_model_hears_and_speaks_with_its_own_voice(tmp_path: Path) -> None:
    from support import tiny_models
    from support.tiny_models import Family, omni_checkpoint

    build, serve = recipe("serve-tiny", "MODEL=qwen2.5-omni", f"TINY_MODELS={tmp_path}")
    assert build[-4:] == ["-m", "support.tiny_models", str(tmp_path), "qwen2.5-omni"]
    assert serve[-4:] == ["omni_ws", "serve", "--config", f"{tmp_path}/serve.toml"]
    # Not built once more.
    (tmp_path / "qwen2.5-omni").symlink_to(omni_checkpoint(Family.QWEN25).resolve())
    tiny_models.main(tmp_path, "qwen2.5-omni")
    reply = tmp_path / "reply.wav"
    async with live_server(create_engine(load(toml=tmp_path / "serve.toml").config)) as server:
        frames = ("--config", "stage_sampling.talker.max_tokens=60")
        asked = partial(talk, f"http://127.0.0.1:{server.port}", "--file", str(CLIP), "--fast", *frames)
        events = await asyncio.to_thread(asked, "--save", str(reply), "--voice", "ethan")
    final = final_of(events)
    assert final["usage"]["input_audio_ms"] == pytest.approx(seconds_of(CLIP) * 1000, abs=20)
    assert final["usage"]["output_tokens"] == LONGEST
    assert seconds_of(reply) == pytest.approx(60 / 50)  # codes, of which there are so many a second


def final_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    (final,) = [event for event in events if event["type"] == "final"]
    return final


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(event["text"] for event in events if event["type"] == "text")


def curl_lines() -> list[str]:
    """Those of the README, in its order."""
    talk = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Talk to it")[2]
    block = talk.partition("```sh\n")[2].partition("```")[0].replace("\\\n", " ")
    return [line for line in block.splitlines() if "curl" in line and not line.startswith("#")]


def shell(line: str, address: str, folder: Path) -> bytes:
    command = line.replace(README_ADDRESS, address).replace("-o ", f"-o {folder}/")
    ended = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command], cwd=ROOT, capture_output=True, timeout=PATIENCE_SEC, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_the_curl_lines_of_the_readme(address: str, tmp_path: Path) -> None:
    text, recording, microphone, speech, transcription = curl_lines()
    # The recording as a microphone gives it, in place of the one that arecord needs.
    spoken = f"cat {CLIP} | {microphone.partition('|')[2]}"
    for line in (text, recording, spoken):
        *events, done, _ = shell(line, address, tmp_path).decode().split("\n\n")
        assert done == "data: [DONE]"
        chunks = [json.loads(event.removeprefix("data: ")) for event in events if event.startswith("data: ")]
        said = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
        assert said
        assert "length" in [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    shell(speech, address, tmp_path)
    with av.open(str(tmp_path / "morning.mp3")) as file:
        samples = sum(frame.samples for frame in file.decode(audio=0))
    assert samples > 0
    refusal = json.loads(shell(transcription, address, tmp_path))
    assert refusal["error"]["code"] == "unsupported_parameter"


def test_the_sdk_of_openai(address: str) -> None:
    openai = pytest.importorskip("openai", reason="the openai package is not installed")
    hello: Any = [{"role": "user", "content": "Hello!"}]
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        (model,) = client.models.list().data[:1]
        whole = client.chat.completions.create(model=model.id, messages=hello, temperature=0, max_tokens=16)
        streamed = client.chat.completions.create(
            model=model.id, messages=hello, temperature=0, max_tokens=16, stream=True
        )
        said = "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices)
        assert said == whole.choices[0].message.content != ""
        assert whole.usage.completion_tokens == 16

        spoken = client.chat.completions.create(
            model=model.id, messages=hello, modalities=["text", "audio"], audio={"voice": "ada", "format": "wav"}
        )
        assert seconds_of(b64decode(spoken.choices[0].message.audio.data)) > 0
        read_aloud = client.audio.speech.create(
            model="tts-1", voice="bob", input="Good morning.", response_format="wav"
        )
        assert seconds_of(read_aloud.content) > 0

        with pytest.raises(openai.BadRequestError) as refused:
            client.audio.speech.create(model="tts-1", voice="eve", input="Good morning.")
        assert refused.value.param == "voice"


def test_make_serve_with_a_model_and_a_talker() -> None:
    names = ("MODEL=/models/thinker", "TALKER=/models/talker")
    settings = "--port 0 --vllm.args.max_model_len 1024"
    (serve,) = recipe("serve", "ENGINE=vllm", "VLLM=cpu", *names, f"ARGS={settings}")
    program, given = serve[:6], serve[6:]
    assert program == ["set", "-f;", "exec", f"{sys.prefix}/bin/python", "-m", "omni_ws"]
    config = load(given).config
    assert (config.engine, config.port) == (EngineName.VLLM, 0)
    assert (config.vllm.model, config.vllm.talker) == ("/models/thinker", "/models/talker")
    assert config.vllm.args == {"max_model_len": 1024}


def test_the_lines_of_the_guide_to_token_sessions(
    address: str, grpc_port: int, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    guide = (ROOT / "docs" / "salience.md").read_text()
    (line,) = re.findall(r"^\.venv-vllm/bin/python (examples/salience_client\.py .*)$", guide, re.MULTILINE)
    arguments = [str(folder / "thinker") if one.endswith("tiny-models/thinker") else one for one in shlex.split(line)]
    arguments += ["--address", f"127.0.0.1:{grpc_port}"]
    # The program, in this process, which has imported what it needs.
    for more, last in {"": r"11 \+ \d+ tokens, (length|eos)", "--score": r"log-probability -\d.*"}.items():
        monkeypatch.setattr(sys, "argv", [*arguments, *more.split()])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(ROOT / arguments[0]), run_name="__main__")
        assert end.value.code == 0
        assert re.fullmatch(last, capsys.readouterr().out.splitlines()[-1])


def test_a_taken_port_is_known_before_a_model_is_looked_for(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        serve = [sys.executable, "-m", "omni_ws", "serve", "--engine", "vllm", "--model", str(tmp_path / "nowhere")]
        ended = subprocess.run(
            [*serve, "--port", "0", "--grpc-port", str(port)],
            cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_SEC, check=False,
        )  # fmt: skip
    assert ended.returncode == 1
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("omni-ws")]
    assert line.startswith(f"omni-ws serve: error: gRPC cannot listen on 127.0.0.1:{port}, Address already in use: ")


def folder_of_sockets(models: Iterable[int]) -> Path:
    """Where vLLM's processes have theirs."""
    variables = [one for pid in models for one in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")]
    (folder,) = {one for one in variables if one.startswith(b"VLLM_RPC_BASE_PATH=")}
    return Path(folder.decode().partition("=")[2])


def cpu_seconds(process: int) -> float:
    """The CPU time of a process and those below it, and of those that have ended and been waited for, so far."""
    import psutil

    whole = [psutil.Process(process), *psutil.Process(process).children(recursive=True)]
    return sum(sum(one.cpu_times()[:4]) for one in whole) + ended_cpu_seconds()


def ended_cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_ctrl_c_lets_the_answer_finish_and_ends_make(process: subprocess.Popen[str], address: str) -> None:
    """The last test of this server. Its models are in the same process group, so they get the signal too.

    It stops as soon as the answer is there, and leaves nothing behind.
    """
    import psutil

    openai = pytest.importorskip("openai", reason="the openai package is not installed")
    (serving,) = psutil.Process(process.pid).children()
    models = [one.pid for one in serving.children()]
    sockets = folder_of_sockets(models)
    assert sockets.stat().st_mode & 0o777 == 0o700
    assert any(path.is_socket() for path in sockets.iterdir())
    ends = [os.pidfd_open(pid) for pid in models]
    hello: Any = [{"role": "user", "content": "Hello!"}]
    reasons: list[str | None] = []
    before = 0.0
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        for chunk in client.chat.completions.create(
            model="local-model", messages=hello, temperature=0, max_tokens=400, stream=True
        ):
            if not reasons:
                os.killpg(process.pid, signal.SIGINT)
            if len(reasons) % 20 == 0 and not any(reasons):
                before = cpu_seconds(process.pid)
            reasons += [choice.finish_reason for choice in chunk.choices]
    assert reasons[-1] == "length"
    # Make waits for the server, and then ends by the signal itself.
    assert process.wait(PATIENCE_SEC) in (0, -signal.SIGINT)
    assert ended_cpu_seconds() - before < IDLE_STOP_CPU_SEC * 2
    for end in ends:
        assert select.select([end], [], [], 300)[0], "a process is left"
        os.close(end)
    assert not sockets.exists()
