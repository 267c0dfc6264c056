"""A checkpoint without a chat template: what it serves and refuses, and a template from the operator."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from support.engine_answers import Input
from support.live_server import LiveServer, live_server
from support.native_client import native_client
from support.vllm_engine import answer, plain_answer, running_engine

from omni_ws.config.model import VllmConfig
from omni_ws.engine.base import AnswerOptions
from omni_ws.engine.vllm.engine import VllmEngine
from omni_ws.engine.vllm.language_model import LanguageModel
from omni_ws.errors import EngineFailed, InvalidValue

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]

IGNORES_TOOLS = "ignores tools"
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def untemplated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from support.tiny_models import build_text_model

    folder = build_text_model(tmp_path_factory.mktemp("no-template") / "base")
    (folder / "chat_template.jinja").unlink()
    return folder


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def engine(untemplated: Path) -> AsyncIterator[VllmEngine]:
    from support.tiny_models import ENGINE_ARGS

    async with running_engine(untemplated, ENGINE_ARGS) as engine:
        yield engine


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def server(engine: VllmEngine) -> AsyncIterator[LiveServer]:
    async with live_server(engine, still_answers=False) as server:
        yield server


@pytest_asyncio.fixture(loop_scope="session")
async def client(server: LiveServer) -> AsyncIterator[Any]:
    import openai

    base_url = f"http://127.0.0.1:{server.port}/v1"
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


async def test_prompts_as_they_stand_are_completed(engine: VllmEngine, client: Any) -> None:
    completed = await client.completions.create(model="local-model", prompt="Once", temperature=0, max_tokens=24)
    assert completed.choices[0].text == await plain_answer(engine, "Once")


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_is_refused_by_name(client: Any, stream: bool) -> None:
    import openai

    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(model="local-model", messages=HELLO, stream=stream)
    assert refused.value.code == "unsupported_parameter"
    assert "base has no chat template" in refused.value.message
    assert "--vllm.chat-template FILE" in refused.value.message


async def test_a_native_request_is_refused_by_name_and_the_session_goes_on(server: LiveServer) -> None:
    async with native_client(server) as native:
        assert native.created["capabilities"]["tasks"] == []
        for _ in range(2):
            await native.say("Hello")
            (error,) = (await native.answer()).errors
            assert error["code"] == "unsupported_parameter"
            assert "no chat template" in error["message"]


async def test_the_operator_is_told(engine: VllmEngine) -> None:
    assert any("no chat template" in line for line in engine.describe())


async def test_the_operator_is_told_before_the_model_is_loaded(
    untemplated: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def unloaded(self: LanguageModel) -> None:
        raise EngineFailed("not loaded")

    monkeypatch.setattr(LanguageModel, "start", unloaded)
    with pytest.raises(EngineFailed, match="not loaded"):
        await VllmEngine(VllmConfig(model=str(untemplated))).start()
    assert "base has no chat template" in caplog.text


def test_where_a_template_is_looked_for(tmp_path: Path) -> None:
    from omni_ws.engine.vllm.checkpoint import lacks_chat_template

    model = str(tmp_path)
    settings = tmp_path / "tokenizer_config.json"
    assert not lacks_chat_template(model)  # known when it has loaded
    settings.write_text("[]")
    assert not lacks_chat_template(model)
    settings.write_text("{}")
    assert lacks_chat_template(model)
    settings.write_text('{"chat_template": "{{ messages }}"}')
    assert not lacks_chat_template(model)
    settings.write_text("{}")
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert not lacks_chat_template(model)
    assert not lacks_chat_template("some-owner/never-downloaded")
    assert not lacks_chat_template(str(tmp_path / "nowhere"))


async def test_a_template_of_the_operators_makes_it_chat(untemplated: Path, tmp_path: Path) -> None:
    """It knows no tools and refuses system messages, and the operator and the client are told so."""
    from support.tiny_models import ENGINE_ARGS

    template = tmp_path / "chat.jinja"
    template.write_text(
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system messages') }}{% endif %}"
        "{% if m['role'] == 'user' %}<user>{{ m['content'] }}{% endif %}{% endfor %}<answer>"
    )
    async with running_engine(untemplated, ENGINE_ARGS, chat_template=template, tool_parser="hermes") as engine:
        assert any(IGNORES_TOOLS in line for line in engine.describe())
        assert engine.capabilities.chat_refusal == ""
        text, final = await answer(engine, Input("Hello"))
        assert text == await plain_answer(engine, "<user>Hello<answer>")
        assert final.usage.input_tokens == len("<user>Hello<answer>")
        for role, reason in (("system", "no system messages"), ("assistant", "chat template")):
            with pytest.raises(InvalidValue, match=reason):
                await answer(engine, Input("Hello"), options=AnswerOptions(input_role=role))
