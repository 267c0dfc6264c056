"""OpenAI's Agents SDK in Chromium, over WebRTC: a spoken turn, and one that interrupts its answer.

Nothing of the package is changed but its URL. The microphone is a recording that Chromium plays in real time.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.chromium import chromium, recording
from support.embedded_engine import ears
from support.live_server import live_server
from support.outside import tool
from support.scripted_upstream import delta, hang, says, streams, upstream
from support.speech_clips import WORDS, clip_bytes, silence

from omni_ws.config.model import VoiceChoice
from omni_ws.engine.composed.engine import ComposedEngine
from omni_ws.engine.remote.engine import RemoteLlmEngine
from omni_ws.engine.remote.settings import RemoteLlmSettings
from omni_ws.engine.tts.speech_engine import SpeechEngine
from omni_ws.engine.tts.voice_process import VoiceProcess
from omni_ws.scenarios.speech import word_errors

BUNDLE = "node_modules/@openai/agents-realtime/dist/bundle/openai-realtime-agents.umd.js"
#: Longer than what is said after it begins.
STORY = "Once there was a king who had a very large garden, and in that garden stood a hundred old apple trees. " * 3
TOLD = "It is sunny in Tokyo."
TALK = """async (secret) => {
  const { RealtimeAgent, RealtimeSession } = OpenAIAgentsRealtime;
  const agent = new RealtimeAgent({ name: "Assistant", instructions: "Be brief." });
  const session = window.session = new RealtimeSession(agent, {
    transport: new OpenAIAgentsRealtime.OpenAIRealtimeWebRTC({ baseUrl: `${location.origin}/v1/realtime/calls` }),
    model: "gpt-realtime",
  });
  const events = [];
  let interrupted = 0;
  session.on("audio_interrupted", () => { interrupted += 1; });
  session.on("error", (error) => events.push({ type: "sdk error", error: String(error.error?.message ?? error) }));
  const told = new Promise((resolve) => session.on("transport_event", (event) => {
    events.push(event);
    const stopped = events.filter(({ type }) => type === "output_audio_buffer.stopped").length;
    if (event.type === "output_audio_buffer.stopped" && stopped === 1) resolve();
  }));
  await session.connect({ apiKey: secret });
  await told;
  const { peerConnection } = session.transport.connectionState;
  const reports = [...(await peerConnection.getStats()).values()];
  const inbound = reports.find(({ type, kind }) => type === "inbound-rtp" && kind === "audio");
  session.close();
  return JSON.stringify({ events, interrupted, inbound, callId: session.transport.callId ?? null });
}"""

pytestmark = [pytest.mark.slow, pytest.mark.real_time]


async def test_the_agents_package_calls_from_a_page(tmp_path: Path) -> None:
    bundle = Path(tool("OUTSIDE_NODE")) / BUNDLE
    spoken = [silence(2), clip_bytes("goforward"), silence(3), clip_bytes("cards_001"), silence(60)]
    microphone = recording(tmp_path / "speech.wav", *spoken)
    story = streams(delta(role="assistant"), delta(content=STORY), hang)
    async with (
        upstream(story, says(TOLD)) as model,
        live_server(
            ComposedEngine(
                RemoteLlmEngine(RemoteLlmSettings(urls=(model.url,), start_timeout=0)),
                asr=ears(),
                tts=SpeechEngine(VoiceProcess(VoiceChoice.ESPEAK)),
            )
        ) as server,
        chromium(
            "--use-fake-ui-for-media-stream", "--autoplay-policy=no-user-gesture-required", microphone=microphone
        ) as browser,
    ):
        url = f"http://127.0.0.1:{server.port}"
        page = await (await browser.new_context(permissions=["microphone"])).new_page()
        secret = (await (await page.request.post(f"{url}/v1/realtime/client_secrets")).json())["value"]
        await page.route(
            f"{url}/call.html", lambda route: route.fulfill(body="<!doctype html>", content_type="text/html")
        )
        await page.goto(f"{url}/call.html")
        await page.add_script_tag(path=bundle)
        seen: dict[str, Any] = json.loads(await page.evaluate(TALK, secret))
        await server.check_empty()
    events = seen["events"]
    kinds = [event["type"] for event in events]
    assert "sdk error" not in kinds
    assert "error" not in kinds
    heard = [one["transcript"] for one in events if one["type"].endswith("input_audio_transcription.completed")]
    assert word_errors(WORDS["goforward"], heard[0].strip()).wrong <= 1
    assert (
        heard[1].split()[-2:] == WORDS["cards_001"].split()[-2:]
    )  # its beginning went through the browser's canceller
    assert kinds.index("output_audio_buffer.started") < kinds.index("output_audio_buffer.cleared")
    responses = [event["response"] for event in events if event["type"] == "response.done"]
    assert [response["status"] for response in responses] == ["cancelled", "completed"]
    assert responses[0]["status_details"]["reason"] == "turn_detected"
    assert model.deserted.is_set(), "the answer that was interrupted went on"
    assert seen["inbound"]["totalAudioEnergy"] > 0.01
    assert seen["inbound"]["packetsLost"] == 0
