"""The openai package of Python, as its users use it. The base URL and a recording are the arguments."""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from pathlib import Path
from typing import Any

import openai
from pydantic import BaseModel

BASE_URL, RECORDING = sys.argv[1], Path(sys.argv[2])
HELLO: list[Any] = [{"role": "user", "content": "hello big world"}]
BREAK: list[Any] = [{"role": "user", "content": "please break now"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class Person(BaseModel):
    name: str
    age: int


def raised(kind: type[Exception], call: Any) -> Any:
    """The error that ``call`` raises, at once or while its stream is read."""
    try:
        result = call()
        if hasattr(result, "__iter__"):
            list(result)
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def chat(client: openai.OpenAI) -> None:
    create = client.chat.completions.create
    whole = create(model="local-model", messages=HELLO)
    assert whole.choices[0].message.content == "hello big world"
    chunks = list(create(model="local-model", messages=HELLO, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "hello big world"
    assert chunks[-1].usage == whole.usage
    several = create(model="local-model", messages=HELLO, n=2, logprobs=True, top_logprobs=2)
    assert [choice.message.content for choice in several.choices] == ["hello big world"] * 2
    logprobs = several.choices[1].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [entry.token for entry in logprobs.content] == ["hello", " big", " world"]
    assert len(logprobs.content[0].top_logprobs) == 2
    with client.chat.completions.stream(model="local-model", messages=HELLO, n=2, logprobs=True) as stream:
        final = stream.get_final_completion()
    assert [choice.message.content for choice in final.choices] == ["hello big world"] * 2
    assert final.choices[1].logprobs is not None


def tools(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="local-model", messages=HELLO, tools=[WEATHER]) as stream:
        names = [event.name for event in stream if event.type == "tool_calls.function.arguments.done"]
        message = stream.get_final_completion().choices[0].message
    assert names == ["get_weather"]
    assert message.tool_calls
    (call,) = message.tool_calls
    assert call.id == "call_get_weather_0"
    assert call.function.parsed_arguments == {"city": "Tokyo"}
    whole = client.chat.completions.create(model="local-model", messages=HELLO, tools=[WEATHER])
    assert whole.choices[0].finish_reason == "tool_calls"
    answered = client.chat.completions.create(
        model="local-model",
        tools=[WEATHER],
        messages=[
            *HELLO,
            whole.choices[0].message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "sunny and dry"},
        ],
    )
    assert answered.choices[0].message.content == "sunny and dry"


def forms(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(model="local-model", messages=HELLO, response_format=Person)
    assert parsed.choices[0].message.parsed == Person(name="Ann", age=30)
    with client.chat.completions.stream(model="local-model", messages=HELLO, response_format=Person) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == Person(name="Ann", age=30)


def completions(client: openai.OpenAI) -> None:
    create = client.completions.create
    assert create(model="local-model", prompt="a b c", max_tokens=2).choices[0].text == "a b"
    chunks = list(create(model="local-model", prompt=["a b", "c d"], logprobs=1, stream=True))
    texts = {index: "".join(c.choices[0].text for c in chunks if c.choices[0].index == index) for index in (0, 1)}
    assert texts == {0: "a b", 1: "c d"}
    assert [c.choices[0].finish_reason for c in chunks].count("stop") == 2
    logprobs = chunks[0].choices[0].logprobs
    assert logprobs is not None
    assert logprobs.text_offset == [0]


def speech(client: openai.OpenAI) -> None:
    whole = client.audio.speech.create(model="tts-1", voice="alloy", input="one two", response_format="wav")
    assert whole.content.startswith(b"RIFF")
    streaming = client.audio.speech.with_streaming_response.create
    with streaming(model="tts-1", voice="alloy", input="one two", response_format="pcm") as response:
        assert len(b"".join(response.iter_bytes())) == 2 * 24_000 * 2 * 20 // 1000


def transcriptions(client: openai.OpenAI) -> None:
    create = client.audio.transcriptions.create
    with RECORDING.open("rb") as file:
        assert create(model="whisper-1", file=file).text == "go forward"
    verbose = create(
        model="whisper-1",
        file=RECORDING,
        response_format="verbose_json",
        timestamp_granularities=["word", "segment"],
        language="en",
    )
    assert verbose.words
    assert [(word.word, word.start, word.end) for word in verbose.words] == [("go", 0, 0.2), ("forward", 0.2, 0.7)]
    # This engine does not say what a segment has: how sure it is, for one.
    assert verbose.segments == []
    assert "00:00:00,000 --> 00:00:00,700" in create(model="whisper-1", file=RECORDING, response_format="srt")
    events = list(create(model="gpt-4o-mini-transcribe", file=RECORDING, stream=True))
    assert [event.type for event in events] == ["transcript.text.delta"] * 2 + ["transcript.text.done"]
    assert events[-1].text == "go forward"


def errors(client: openai.OpenAI) -> None:
    create = client.chat.completions.create
    for stream in (False, True):
        wrong: Any = {"model": "local-model", "messages": HELLO, "stream": stream}
        error = raised(openai.BadRequestError, partial(create, **wrong, top_logprobs=30))
        assert (error.param, error.code) == ("top_logprobs", "invalid_value")
    broken = raised(openai.APIError, partial(create, model="local-model", messages=BREAK, stream=True))
    assert broken.code == "engine_failed"
    assert broken.message.startswith("the engine broke, as it was told to; error id err_")
    broken = raised(openai.InternalServerError, partial(create, model="local-model", messages=BREAK))
    assert broken.code == "engine_failed"
    prompt = "please break now soon"
    broken = raised(
        openai.APIError, partial(client.completions.create, model="local-model", prompt=prompt, stream=True)
    )
    assert broken.code == "engine_failed"


async def asynchronous() -> None:
    async with openai.AsyncOpenAI(base_url=BASE_URL, api_key="not-needed", max_retries=0) as client:
        assert [model.id async for model in client.models.list()]
        stream = await client.chat.completions.create(model="local-model", messages=HELLO, stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "hello big world"
        async with client.chat.completions.stream(model="local-model", messages=HELLO, tools=[WEATHER]) as streaming:
            calls = (await streaming.get_final_completion()).choices[0].message.tool_calls
        assert calls
        assert calls[0].function.parsed_arguments == {"city": "Tokyo"}
        text = await client.completions.create(model="local-model", prompt="a b")
        assert text.choices[0].text == "a b"
        whole = await client.audio.transcriptions.create(model="whisper-1", file=RECORDING)
        assert whole.text == "go forward"
        spoken = await client.audio.speech.create(model="tts-1", voice="alloy", input="one", response_format="wav")
        assert spoken.content.startswith(b"RIFF")
        broken = await client.chat.completions.create(model="local-model", messages=BREAK, stream=True)
        code = None
        try:
            async for _ in broken:
                pass
        except openai.APIError as error:
            code = error.code
        assert code == "engine_failed"


def main() -> None:
    with openai.OpenAI(base_url=BASE_URL, api_key="not-needed", max_retries=0) as client:
        assert client.models.retrieve(client.models.list().data[0].id).owned_by == "omni_ws"
        for use in (chat, tools, forms, completions, speech, transcriptions, errors):
            use(client)
            print(use.__name__, "passed", flush=True)
    asyncio.run(asynchronous())
    print("asynchronous passed")


main()
