"""Bodies of the OpenAI-compatible routes: parsed and configured, or refused with an error that can be sent.

The first byte chooses the route. The rest is the body.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import harness

with harness.instrumented():
    from omni_ws.core.chunks import InputChunk
    from omni_ws.engine.fake import CAPABILITIES
    from omni_ws.errors import InvalidRequest
    from omni_ws.service.conversation.configuration import Configuration, ConfigurationRules, ServedModel
    from omni_ws.service.sessions.factory import FILE_FORMATS
    from omni_ws.transport.http.request import error_body
    from omni_ws.wire.frames import loads_object
    from omni_ws.wire.openai_fields import MAX_CHOICES, MediaFile
    from omni_ws.wire.openai_requests import (
        ChatRequest,
        CompletionRequest,
        SpeechRequest,
        TranscriptionRequest,
        read_chat,
        read_completion,
        read_speech,
        read_transcription,
    )

    RULES = ConfigurationRules(capabilities=CAPABILITIES, model=ServedModel(("fake",)), output_formats=FILE_FORMATS)

Request = ChatRequest | SpeechRequest | CompletionRequest | TranscriptionRequest
READERS: tuple[Callable[[Mapping[str, Any]], Request], ...] = (
    partial(read_chat, input_follows=False),
    partial(read_chat, input_follows=True),
    partial(read_speech, input_follows=False),
    partial(read_speech, input_follows=True),
    read_completion,
    read_transcription,
)


def check(data: bytes) -> None:
    if not data:
        return
    try:
        body = loads_object(data[1:])
        request = READERS[data[0] % len(READERS)](body)
    except UnicodeDecodeError:
        return
    except InvalidRequest as error:
        _can_be_told(error)
        return
    _check_request(request)
    try:
        Configuration(RULES).apply(request.patch.fields)
    except InvalidRequest as error:
        error.param = request.patch.name_in_body(error.param)
        _can_be_told(error)


def _check_request(request: Request) -> None:
    match request:
        case ChatRequest(answer=answer, input=items):
            assert 1 <= answer.choices <= MAX_CHOICES
            assert all(isinstance(item, InputChunk | MediaFile) for item in items)
            assert request.wants_text or request.wants_audio
        case SpeechRequest(text=text):
            assert text is None or text.strip() or text == ""
        case CompletionRequest(prompts=prompts, answer=answer):
            assert all(prompts)
            assert 1 <= len(prompts) * answer.choices <= MAX_CHOICES
        case TranscriptionRequest(granularities=granularities):
            assert granularities


def _can_be_told(error: InvalidRequest) -> None:
    assert len(error_body(error)) < 4096, error
    assert error.param is None or re.match(r"[^.\[]", error.param), error.param


def seeds() -> Iterator[bytes]:
    said = b'"messages":[{"role":"system","content":"be short"},{"role":"user","content":"hi"}]'
    call = b'{"id":"c1","type":"function","function":{"name":"f","arguments":"{}"}}'
    tools = b'"tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object"}}}],"tool_choice":"auto"'
    parts = b'{"type":"text","text":"a"},{"type":"input_audio","input_audio":{"data":"AAAA","format":"pcm"}}'
    image = b"data:image/gif;base64,R0lGODlhAQABAAAAADs="
    for chat in (bytes([0]), bytes([1])):
        yield chat + b"{%b}" % said
        yield chat + b'{%b,"stream":true,"stream_options":{"include_usage":true},"n":2,"logprobs":true}' % said
        yield chat + b'{%b,%b,"parallel_tool_calls":false}' % (said, tools)
        yield chat + b'{"messages":[{"role":"assistant","tool_calls":[%b]},{"role":"tool","tool_call_id":"c1"}]}' % call
        yield chat + b'{"modalities":["text","audio"],"audio":{"voice":"alloy","format":"mp3"},%b}' % said
        yield chat + b'{%b,"response_format":{"type":"json_schema","json_schema":{"name":"a","schema":{}}}}' % said
        yield chat + b'{%b,"images":["%b","a/b.png"],"video_fps":2,"image_min_pixels":4}' % (said, image)
        yield chat + b'{"messages":[{"role":"user","content":[%b]}],"talker_top_k":3,"stop":["a"]}' % parts
        yield chat + b'{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"%b"}}]}]}' % image
    for speech in (bytes([2]), bytes([3])):
        yield speech + b'{"input":"hi","voice":{"id":"alloy"},"response_format":"pcm","speed":1}'
        yield speech + b'{"stream_format":"sse","stream":true,"output_audio":{"sample_rate":8000}}'
    yield bytes([4]) + b'{"prompt":["a","b"],"n":2,"best_of":2,"logprobs":5,"max_tokens":3,"echo":false}'
    yield bytes([4]) + b'{"prompt":[1,2],"logprobs":true}'
    yield bytes([5]) + b'{"response_format":"verbose_json","timestamp_granularities":["word"],"temperature":"0.5"}'
    yield bytes([5]) + b'{"language":"en-GB","stream":"true","input_audio":{"sample_rate":8000}}'
    for vector in harness.vectors("session_config.jsonl"):
        for step in vector["steps"]:
            if "patch" in step:
                yield bytes([0]) + b"{%b,%b" % (said, _members(step["patch"]))


def _members(patch: Mapping[str, Any]) -> bytes:
    """The inside of an object, with its closing brace."""
    return json.dumps({"unknown": 0, **patch}).encode().removeprefix(b"{")


if __name__ == "__main__":
    harness.fuzz(check, seeds)
