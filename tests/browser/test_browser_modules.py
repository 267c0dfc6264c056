"""The parts of the page that touch no page, run in the browser: the wire against the golden vectors, what is kept to be
sent again, and the jitter buffer."""

from __future__ import annotations

import base64
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest_asyncio
from support.chromium import IN_BROWSER, DemoPage, demo_page
from support.golden_frames import check_binary_frames, check_text_frames
from support.live_server import live_server

# One page for all: nothing here leaves a trace in it.
pytestmark = IN_BROWSER


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def demo() -> AsyncIterator[DemoPage]:
    async with live_server() as server, demo_page() as page:
        await page.open(f"http://127.0.0.1:{server.port}/")
        yield page


async def test_binary_frames(demo: DemoPage) -> None:
    await check_binary_frames(demo.page.evaluate)


async def test_text_frames(demo: DemoPage) -> None:
    await check_text_frames(demo.page.evaluate)


async def test_samples_are_little_endian_everywhere(demo: DemoPage) -> None:
    found = await demo.page.evaluate(
        """async () => {
          const { bytesOf, samplesOf } = await import("/client/frames.js");
          const odd = samplesOf(new Uint8Array([1, 2, 3, 128, 9]).subarray(0));
          return [[...bytesOf(Int16Array.of(1, -2, 258))], [...odd]];
        }"""
    )
    assert found == [[1, 0, 254, 255, 2, 1], [0x0201, -32765]]


async def test_what_is_kept_to_be_sent_again(demo: DemoPage) -> None:
    found = await demo.page.evaluate(
        """async () => {
          const { Outgoing } = await import("/client/outgoing.js");
          const number = (frame) => new DataView(frame.buffer).getUint32(4);
          const chunk = (turn, bytes = 10) => ({ modality: "audio", payload: new Uint8Array(bytes), turn });
          const steps = {};
          const one = new Outgoing(100);
          [null, null, 7, 7, 8].forEach((turn) => one.add(chunk(turn)));
          one.acknowledge(3);
          steps.keptBytes = one.keptBytes; // 2 (of turn 7, not answered), 3 and 4
          steps.unacknowledged = one.unacknowledged;
          steps.late = [one.acknowledge(1), one.unacknowledged][1];
          steps.resumed = one.resume(3).map(number);
          steps.room = [one.hasRoom(80), one.hasRoom(81)];
          one.answered(7);
          steps.afterAnswer = one.keptBytes;
          const { frames, turns } = one.restart();
          steps.restarted = [frames.map(number), [...turns], one.keptBytes];
          steps.next = number(one.add(chunk(9)));
          return steps;
        }"""
    )
    assert found == {
        "keptBytes": 30,
        "unacknowledged": 2,
        "late": 2,
        "resumed": [3, 4],
        "room": [True, False],
        "afterAnswer": 20,
        "restarted": [[0], [8], 10],
        "next": 1,
    }


async def test_an_answer_belongs_to_its_request(demo: DemoPage) -> None:
    """Whatever comes late: out of a session that was lost, of a request that is over, of sound that was stopped."""
    found = await demo.page.evaluate(
        """async () => {
          const { Conversation } = await import("/client/conversation.js");
          const conversation = new Conversation();
          const say = (id, text) =>
            conversation.apply({ type: "output_chunk", request_id: id, modality: "text", text });
          const end = (id, reason) =>
            conversation.apply({ type: "output_chunk", request_id: id, final: true, finish_reason: reason });
          for (const text of ["lost", "asked again", "never asked"]) conversation.begin("written", { text });
          say("r1", "one");
          conversation.lose(new Set([1]));
          conversation.cut(conversation.turns[0], 500);
          conversation.apply({ type: "audio", samples: new Int16Array(1) });
          conversation.begin("written", { text: "after it" });
          say("s1", "two");
          end("s1", "stop");
          conversation.apply({ type: "response_started", request_id: "s1" });
          conversation.apply({ type: "error", error: { code: "engine_failed", request_id: "s2" } });
          end("s2", "error");
          conversation.stop(conversation.turns[3]);
          end("s2", "stop");
          conversation.cut(conversation.turns[1], 500);
          return conversation.turns.map(({ requestId, answer }) => [requestId, answer.state, answer.text]);
        }"""
    )
    assert found == [
        ["r1", "failed", "one"],
        ["s1", "stopped", "two"],
        [None, "failed", ""],
        ["s2", "failed", ""],
    ]


async def test_a_greeting_answers_nothing(demo: DemoPage) -> None:
    """What was asked meanwhile keeps its own answer."""
    found = await demo.page.evaluate(
        """async () => {
          const { Conversation } = await import("/client/conversation.js");
          const conversation = new Conversation();
          conversation.begin("written", { text: "asked" });
          const started = { type: "response_started", request_id: "g", trigger: "greeting" };
          for (const again of [started, started]) conversation.apply(again);
          conversation.apply({ type: "output_chunk", request_id: "g", modality: "text", text: "Hello" });
          conversation.apply({ type: "output_chunk", request_id: "g", final: true, finish_reason: "stop" });
          conversation.apply({ type: "response_started", request_id: "r", trigger: "min_length" });
          conversation.apply({ type: "output_chunk", request_id: "r", modality: "text", text: "answered" });
          conversation.apply({ type: "output_chunk", request_id: "r", final: true, finish_reason: "stop" });
          return conversation.turns.map((turn) => [turn.kind, turn.requestId, turn.user.done, turn.answer.text]);
        }"""
    )
    assert found == [["written", "r", True, "answered"], ["greeting", "g", True, "Hello"]]


async def test_what_was_heard_last_is_what_was_heard(demo: DemoPage) -> None:
    found = await demo.page.evaluate(
        """async () => {
          const { Conversation } = await import("/client/conversation.js");
          const conversation = new Conversation();
          const hear = (id, text, interim) =>
            conversation.apply({ type: "output_chunk", request_id: id, modality: "transcript", text, interim });
          const end = (id, reason) =>
            conversation.apply({ type: "output_chunk", request_id: id, final: true, finish_reason: reason });
          const turns = [0, 1, 2, 3, 4].map(() => conversation.begin("heard"));
          hear("cut short", "turn", true);
          hear("cut short", "turn the", true);
          end("cut short", "cancelled");
          hear("in pieces", "Turn the", false);
          hear("in pieces", "light", true);
          end("in pieces", "cancelled");
          hear("settled", "turn the", true);
          hear("settled", "Turn it.", false);
          end("settled", "cancelled");
          hear("no words after all", "um", true);
          hear("no words after all", "", false);
          end("no words after all", "stop");
          hear("lost", "turn", true);
          conversation.lose(new Set());
          return turns.map(({ user }) => [user.text, user.interim]);
        }"""
    )
    assert found == [["turn the", ""], ["Turn the light", ""], ["Turn it.", ""], ["", ""], ["turn", ""]]


#: Plays what `script` pushes at certain quanta, and returns the samples and what was reported.
_PLAY = """async ({ rate, quanta, script }) => {
  const { PlayoutBuffer } = await import("/client/playback-worklet.js");
  const events = [];
  let quantum = 0;
  const buffer = new PlayoutBuffer(rate, ({ type, id, played, offset }) => {
    events.push({ type, id, played, at: quantum * 128 + (offset ?? 0) });
  });
  const out = [];
  for (; quantum < quanta; quantum++) {
    for (const [when, what, id, samples, place] of script) {
      if (when !== quantum) continue;
      if (what === "push") buffer.push(id, new Int16Array(samples).fill(16384), place);
      else buffer[what](id);
    }
    const output = new Float32Array(128);
    buffer.pull(output);
    out.push(...output);
  }
  const { underruns, targetMs, queued, fade } = buffer;
  const bytes = new Uint8Array(Float32Array.from(out).buffer);
  let text = "";
  for (let start = 0; start < bytes.length; start += 32768) {
    text += String.fromCharCode(...bytes.subarray(start, start + 32768));
  }
  return { out: btoa(text), events, underruns, targetMs, queued, fade };
}"""


async def play(demo: DemoPage, quanta: int, *script: tuple[Any, ...], rate: int = 16_000) -> dict[str, Any]:
    found: dict[str, Any] = await demo.page.evaluate(_PLAY, {"rate": rate, "quanta": quanta, "script": script})
    found["out"] = np.frombuffer(base64.b64decode(found["out"]), "<f4")
    return found


def kinds(found: dict[str, Any]) -> list[tuple[str, int, int]]:
    return [(event["type"], event["id"], event["played"]) for event in found["events"]]


async def test_playing_waits_until_enough_is_there(demo: DemoPage) -> None:
    found = await play(demo, 20, (0, "push", 1, 900), (5, "push", 1, 100))  # 60 ms are 960 samples
    assert not found["out"][: 5 * 128].any()
    assert kinds(found)[0] == ("started", 1, 0)
    assert found["events"][0]["at"] == 5 * 128


async def test_a_short_answer_is_played_at_its_end_and_whole(demo: DemoPage) -> None:
    found = await play(demo, 10, (0, "push", 1, 300), (2, "end", 1))
    assert kinds(found) == [("started", 1, 0), ("ended", 1, 300)]
    sounding = np.flatnonzero(found["out"])
    assert (sounding[0], sounding[-1]) == (2 * 128, 2 * 128 + 299)
    assert found["underruns"] == 0


async def test_sound_that_runs_out_fades_and_waits_for_more(demo: DemoPage) -> None:
    found = await play(demo, 60, (0, "push", 1, 1600), (20, "push", 1, 1600), (20, "end", 1))
    assert kinds(found) == [("started", 1, 0), ("underrun", 1, 1600), ("ended", 1, 3200)]
    assert (found["underruns"], found["targetMs"]) == (1, 100)
    assert np.count_nonzero(found["out"]) >= 3200 - 2
    # Nowhere a click: no two samples differ by more than the slope of a fade.
    slope = 0.5 / found["fade"]
    assert np.abs(np.diff(found["out"][: 20 * 128 + 1600])).max() <= slope * 1.01


async def test_the_target_has_a_bound(demo: DemoPage) -> None:
    script = [(quantum, "push", 1, 9000) for quantum in range(0, 2000, 100)]
    found = await play(demo, 2000, *script)
    assert found["underruns"] > 12
    assert found["targetMs"] == 480


async def test_a_flush_is_silent_within_milliseconds(demo: DemoPage) -> None:
    found = await play(
        demo, 40, (0, "push", 1, 4000), (0, "push", 2, 4000), (10, "flush"), (10, "push", 3, 200), (11, "end", 3)
    )
    fade = found["fade"]
    assert kinds(found) == [
        ("started", 1, 0),
        ("flushed", 1, 1280 + fade),
        ("flushed", 2, 0),
        ("started", 3, 0),
        ("ended", 3, 200),
    ]
    flushed = found["out"][1280:]
    assert np.flatnonzero(flushed[:128])[-1] < fade
    assert np.abs(np.diff(flushed[:100])).max() <= 0.5 / fade * 1.01
    assert found["queued"] == 0


async def test_an_answer_that_goes_on_counts_from_where_it_was_heard_to(demo: DemoPage) -> None:
    found = await play(demo, 30, (0, "push", 1, 4000), (10, "flush"), (12, "push", 1, 1600, 1000), (12, "end", 1))
    assert kinds(found)[2:] == [("started", 1, 1000), ("ended", 1, 2600)]


async def test_what_was_held_goes_on_or_ends(demo: DemoPage) -> None:
    found = await demo.page.evaluate(
        """async () => {
          const { Conversation, isOwed } = await import("/client/conversation.js");
          const conversation = new Conversation();
          const frame = (id, more) => conversation.apply({ type: "output_chunk", request_id: id, ...more });
          const sound = (place) => conversation.apply({ type: "audio", place });
          const answer = conversation.begin("written", { text: "talk" });
          conversation.apply({ type: "response_started", request_id: "r" });
          frame("r", { modality: "text", text: "one" });
          for (const at of [0, 4]) { sound(at); conversation.keepSound(answer, "server", new Int16Array(4)); }
          const steps = [];
          const tell = () => steps.push([answer.answer.state, isOwed(answer), answer.heardMs]);
          const cough = conversation.begin("heard");
          conversation.hold(cough);
          conversation.cut(answer, 500);
          tell();
          frame("c", { final: true, finish_reason: "stop" });
          const belongs = sound(6) === answer;
          conversation.keepSound(answer, "server", new Int16Array(3));
          tell();
          const kept = answer.sound.server.map((piece) => piece.length);
          const words = conversation.begin("heard");
          conversation.hold(words);
          frame("r", { final: true, finish_reason: "cancelled" });
          tell();
          return { steps, belongs, kept, interrupts: [cough.interrupts, words.interrupts], cough: cough.answer.state };
        }"""
    )
    assert found == {
        "steps": [["held", True, 500], ["speaking", True, None], ["stopped", False, None]],
        "belongs": True,
        "kept": [4, 2, 3],
        "interrupts": [True, True],
        "cough": "done",
    }


async def test_the_sound_of_an_ended_answer_is_one_piece(demo: DemoPage) -> None:
    found = await demo.page.evaluate(
        """async () => {
          const { Conversation } = await import("/client/conversation.js");
          const conversation = new Conversation();
          const turn = conversation.begin("spoken");
          const { user, server } = turn.sound;
          for (const at of [1, 2, 3]) conversation.keepSound(turn, "user", Int16Array.of(at, -at));
          conversation.apply({ type: "response_started", request_id: "r" });
          for (const at of [4, 5]) conversation.keepSound(turn, "server", Int16Array.of(at));
          const kept = () => [user, server].map((pieces) => pieces.map((piece) => [...piece]));
          const steps = [kept()];
          conversation.apply({ type: "output_chunk", request_id: "r", final: true, finish_reason: "stop" });
          steps.push(kept());
          conversation.keepSound(turn, "user", Int16Array.of(7));
          steps.push(kept());
          conversation.drop(turn);
          steps.push(kept());
          return steps;
        }"""
    )
    assert found == [
        [[[1, -1], [2, -2], [3, -3]], [[4], [5]]],
        [[[1, -1, 2, -2, 3, -3]], [[4, 5]]],
        [[[1, -1, 2, -2, 3, -3], [7]], [[4, 5]]],
        [[], []],
    ]


async def test_more_than_minutes_are_not_held(demo: DemoPage) -> None:
    script = [(0, "push", 1, 16_000 * 60) for _ in range(31)]
    found = await play(demo, 1, *script)
    assert ("overflow", 1, None) in [(event["type"], event["id"], event.get("played")) for event in found["events"]]
    assert found["queued"] <= 16_000 * 1800


async def test_the_saved_sound_is_a_wav_file(demo: DemoPage) -> None:
    found = await demo.page.evaluate(
        """async () => {
          const { soundOf, wavFile } = await import("/browser/recording.js");
          const sound = { user: [Int16Array.of(1, 2)], server: [new Int16Array(8000).fill(7)] };
          const pieces = soundOf([{ heardMs: 100, sound }], 8000);
          return [...new Uint8Array(await wavFile(pieces, 8000).arrayBuffer())];
        }"""
    )
    whole = bytes(found)
    samples = np.frombuffer(whole[44:], "<i2")
    assert whole[:4] == b"RIFF"
    assert int.from_bytes(whole[40:44], "little") == len(samples) * 2
    assert list(samples[:2]) == [1, 2]
    assert np.count_nonzero(samples == 7) == 800  # as much as was heard


async def test_places_in_the_audio_count_what_the_server_listens_to(demo: DemoPage) -> None:
    """What was said with the button does not move the places of an open microphone."""
    found = await demo.page.evaluate(
        """async () => {
          const { Talk } = await import("/client/talk.js");
          const context = {};
          const microphone = Object.assign(new EventTarget(), { isOpen: true, close() {} });
          const turn = { number: 0 };
          const conversation = { begin: () => turn, endSpeech() {}, keepSound() {} };
          const session = { bufferedBytes: 0, sendChunk: () => true, hasBegun: () => true };
          const sound = { rate: 8000, wake: async () => context, running: async () => {} };
          const talk = new Talk({ sound, microphone, session, conversation });
          const hear = (count, from) => {
            for (let index = 0; index < count; index++) {
              const samples = new Int16Array(160).fill(from + index);
              const detail = { samples, peak: 0, capturedAt: 1000 + 20 * index };
              microphone.dispatchEvent(new CustomEvent("chunk", { detail }));
            }
          };
          await talk.press(0);
          hear(50, 0);
          talk.release(5000);
          hear(3, 50);
          talk.mode = "open";
          await talk.press(6000);
          hear(50, 100);
          const samples = talk.samplesBetween(100, 140);
          return { phase: talk.phase, at: talk.spokenAt(130), first: samples.map((one) => one[0]) };
        }"""
    )
    assert found == {"phase": "listening", "at": 1000 + 6 * 20 - 10, "first": [105, 106]}


async def test_a_message_stays_for_its_own_time(demo: DemoPage) -> None:
    """Not for the rest of that of an earlier one of its name, which was dismissed."""
    found = await demo.page.evaluate(
        """async () => {
          const { Messages } = await import("/browser/page.js");
          const real = { setTimeout, clearTimeout };
          const timers = new Map();
          window.setTimeout = (run, ms) => timers.set(timers.size + 1, [run, ms]).size;
          window.clearTimeout = (timer) => timers.delete(timer);
          try {
            const place = document.createElement("div");
            const messages = new Messages(place);
            messages.show("server", "busy", { seconds: 12 });
            place.querySelector("button").click();
            messages.show("server", "busy again", { seconds: 12 });
            for (const [run] of [...timers.values()].slice(0, -1)) run();
            const meanwhile = place.textContent;
            for (const [run] of [...timers.values()]) run();
            return [meanwhile, place.textContent];
          } finally {
            Object.assign(window, real);
          }
        }"""
    )
    assert found == ["busy again×", ""]


async def test_durations(demo: DemoPage) -> None:
    found = await demo.page.evaluate(
        """async () => {
          const { duration } = await import("/browser/calls/shown.js");
          return [0, 3.2, 340, 999.4, 999.6, 1000, 1249, 61_000].map(duration);
        }"""
    )
    plain = [text.replace("\u00a0", " ") for text in found]
    assert plain == ["0 ms", "3 ms", "340 ms", "999 ms", "1.0 s", "1.0 s", "1.2 s", "61.0 s"]


async def test_a_round_trip_is_measured_only_where_nothing_else_is_told(demo: DemoPage) -> None:
    """The pong behind session_resumed comes when all of what was missed has been told again."""
    found = await demo.page.evaluate(
        """async () => {
          const { Session } = await import("/client/session.js");
          const RealSocket = window.WebSocket;
          const sockets = [];
          window.WebSocket = class {
            pings = [];
            constructor() { sockets.push(this); }
            close() {}
            send(text) { this.pings.push(...[JSON.parse(text)].filter(({ type }) => type === "ping")); }
            hear(frame) { this.onmessage({ data: JSON.stringify(frame) }); }
            answer() { for (const { t } of this.pings.splice(0)) this.hear({ type: "pong", t }); }
          };
          try {
            const session = new Session(document.baseURI, () => "");
            const measured = [];
            let count = 0;
            session.addEventListener("rtt", () => count++);
            const step = () => measured.push(count);
            session.open();
            sockets[0].hear({ type: "session_created", session_id: "s", resume_token: "t" });
            sockets[0].answer(step());
            step();
            sockets[0].onclose({ code: 1006 });
            session.open();
            sockets[1].hear({ type: "session_resumed", session_id: "s", resume_token: "u", next_sequence_id: 0 });
            sockets[1].answer();
            step();
            session.check();
            sockets[1].answer();
            step();
            sockets[1].hear({ type: "session_closing", reason: "session_timeout" });
            sockets[1].onclose({ code: 4408 });
            return [measured, session.state];
          } finally {
            window.WebSocket = RealSocket;
          }
        }"""
    )
    assert found == [[0, 1, 1, 2], "ended"]


async def test_a_session_may_be_closed_by_whoever_is_told_of_it(demo: DemoPage) -> None:
    """What was kept for it is not sent any more."""
    found = await demo.page.evaluate(
        """async () => {
          const { Session } = await import("/client/session.js");
          let socket;
          const sent = [];
          class Socket {
            constructor() { socket = this; }
            close() {}
            send(frame) { sent.push(typeof frame === "string" ? JSON.parse(frame).type : "chunk"); }
          }
          const session = new Session(document.baseURI, () => "", { WebSocket: Socket });
          session.sendChunk({ modality: "text", payload: new Uint8Array(1), endOfInput: true, turn: 0 });
          session.addEventListener("created", () => session.close());
          session.open();
          const data = JSON.stringify({ type: "session_created", session_id: "s", resume_token: "t" });
          socket.onmessage({ data });
          return [sent, session.state];
        }"""
    )
    assert found == [["ping"], "ended"]


async def test_a_turn_that_fails_may_be_stopped_by_whoever_is_told_of_it(demo: DemoPage) -> None:
    found = await demo.page.evaluate(
        """async () => {
          const { Talk } = await import("/client/talk.js");
          const { Conversation } = await import("/client/conversation.js");
          const microphone = Object.assign(new EventTarget(), { isOpen: true, close() {} });
          const conversation = new Conversation();
          const session = { bufferedBytes: 0, sendChunk: () => true, hasBegun: () => false };
          const sound = { rate: 8000, wake: async () => ({}), running: async () => {} };
          const talk = new Talk({ sound, microphone, session, conversation });
          await talk.press(0);
          conversation.addEventListener("change", ({ detail }) => {
            if (detail.turn.answer.state === "failed") talk.stop();
          });
          const problems = [];
          const note = (event) => { problems.push(event.message); event.preventDefault(); };
          window.addEventListener("error", note);
          talk.stop();
          window.removeEventListener("error", note);
          return [talk.phase, conversation.turns.map(({ answer }) => answer.state), problems];
        }"""
    )
    assert found == ["off", ["failed"], []]


async def test_a_turn_without_any_sound_is_over_at_once(demo: DemoPage) -> None:
    """Its end alone would open no request, and the next answer would go into it."""
    found = await demo.page.evaluate(
        """async () => {
          const { Talk } = await import("/client/talk.js");
          const { Conversation } = await import("/client/conversation.js");
          const { Outgoing } = await import("/client/outgoing.js");
          const outgoing = new Outgoing();
          const microphone = Object.assign(new EventTarget(), { isOpen: true, close() {} });
          const conversation = new Conversation();
          const session = {
            bufferedBytes: 0,
            sendChunk: (chunk) => outgoing.add(chunk),
            hasBegun: (turn) => outgoing.hasBegun(turn),
          };
          const sound = { rate: 8000, wake: async () => ({}), running: async () => {} };
          const talk = new Talk({ sound, microphone, session, conversation });
          const hear = () => microphone.dispatchEvent(new CustomEvent("chunk", {
            detail: { samples: new Int16Array(160), peak: 0, capturedAt: 0 },
          }));
          await talk.press(0);
          talk.stop();
          await talk.press(0);
          hear();
          talk.stop();
          await talk.press(0);
          hear();
          talk.release(5000);
          talk.stop(); // in the middle of what still belongs to it
          conversation.apply({ type: "response_started", request_id: "first" });
          const turns = conversation.turns.map(({ requestId, answer }) => [requestId, answer.state]);
          return [outgoing.unacknowledged, turns];
        }"""
    )
    assert found == [4, [[None, "failed"], ["first", "thinking"], [None, "thinking"]]]


async def test_results_of_tools(demo: DemoPage) -> None:
    """They are sent as JSON, are sent again to the session that made the call, and to no other."""
    found = await demo.page.evaluate(
        """async () => {
          const { Outgoing } = await import("/client/outgoing.js");
          const outgoing = new Outgoing();
          const payload = new TextEncoder().encode("nöon");
          const frame = outgoing.add({ modality: "text", payload, turn: 3, toolCallId: "c1", endOfInput: true });
          return [JSON.parse(frame), outgoing.resume(0).length, outgoing.restart().frames.length, outgoing.keptBytes];
        }"""
    )
    assert found == [
        {
            "type": "input_chunk",
            "sequence_id": 0,
            "modality": "text",
            "text": "nöon",
            "role": "tool",
            "tool_call_id": "c1",
            "end_of_input": True,
        },
        1,
        0,
        0,
    ]


async def test_the_tools_of_the_page(demo: DemoPage) -> None:
    found = await demo.page.evaluate(
        """async () => {
          const { TOOLS } = await import("/browser/tools.js");
          return [Object.keys(TOOLS), TOOLS.local_time.run({}), TOOLS.local_time.run({ time_zone: "Asia/Tokyo" })];
        }"""
    )
    names, here, there = found
    assert names == ["local_time"]
    assert re.fullmatch(r".+ at .+ \(.+\)", here)
    assert "(Asia/Tokyo)" in there


async def test_answers_are_shown_as_they_are_meant_and_never_read_as_html(demo: DemoPage) -> None:
    text = "# Two\n**bold** and `a*b` <img src=x>\n- one\n- [two](https://a.example/b)\n3. three\n```js\nlet a = 1;\n"
    found = await demo.page.evaluate(
        """async (text) => {
          const { blocksOf, showRichText } = await import("/browser/rich-text.js");
          const { placesOf } = await import("/widget/spoken-word.js");
          const [{ element }] = blocksOf("[x](javascript:alert) 2 * 3 * 4");
          const no = [element.outerHTML, element.children.length];
          const words = ["one", "two", "gone", "one"].map((word) => ({ text: word }));
          const whole = blocksOf(text).map(({ element }) => element.outerHTML).join("");
          const growing = document.createElement("div");
          for (let end = 1; end <= text.length; end++) showRichText(growing, text.slice(0, end));
          const [first] = growing.children;
          showRichText(growing, text + "\\n```\\nlast");
          const kept = growing.firstChild === first && growing.lastChild.textContent === "last";
          showRichText(growing, text);
          return [whole, no, placesOf(words, "one, two; one"), growing.innerHTML === whole, kept];
        }""",
        text,
    )
    assert found[3:] == [True, True]
    assert found[0] == (
        '<p class="heading">Two</p><p><strong>bold</strong> and <code>a*b</code> &lt;img src=x&gt;</p><ul><li>one</li>'
        '<li><a href="https://a.example/b" target="_blank" rel="noopener noreferrer">two</a></li></ul>'
        '<ol><li value="3">three</li></ol><pre tabindex="0" data-language="js"><code>let a = 1;\n</code></pre>'
    )
    assert found[1] == ["<p>[x](javascript:alert) 2 * 3 * 4</p>", 0]
    assert found[2] == [[0, 3], [5, 8], None, [10, 13]]


#: What is written, and the elements that it becomes. The attributes of a table's box are left out.
MARKDOWN = [
    (
        "1. Soft\n2. Medium\n   - cold\n   - warm\n     1) deep\n3. Hard",
        '<ol><li value="1">Soft</li><li value="2">Medium<ul><li>cold</li><li>warm<ol><li value="1">deep</li></ol></li>'
        '</ul></li><li value="3">Hard</li></ol>',
    ),
    # As models indent below a number, and with a tab.
    ("1. a\n  - b\n2. c", '<ol><li value="1">a<ul><li>b</li></ul></li><li value="2">c</li></ol>'),
    ("- a\n\t- b\n - c", "<ul><li>a<ul><li>b</li></ul></li><li>c</li></ul>"),
    # More than a line in an item, and what stands behind the list.
    (
        "7. a\n\n   more\n   ```\n   if x:\n     y\n   ```\n\n8. b\n\nend",
        '<ol><li value="7">a<p>more</p><pre tabindex="0"><code>if x:\n  y</code></pre></li></ol>'
        '<ol><li value="8">b</li></ol><p>end</p>',
    ),
    ("- a\n1. b\n* * *\n---", '<ul><li>a</li></ul><ol><li value="1">b</li></ol><hr><hr>'),
    (
        "so\n| a \\| b | **c** |\n|:-:|--:|\n| 1 | <b> | 3 |\nd |\nend | of\n\nlast",
        '<p>so</p><div class="table"><table><thead><tr><th scope="col" style="text-align: center;">a | b</th>'
        '<th scope="col" style="text-align: end;"><strong>c</strong></th></tr></thead><tbody>'
        '<tr><td style="text-align: center;">1</td><td style="text-align: end;">&lt;b&gt;</td></tr>'
        '<tr><td style="text-align: center;">d</td></tr>'
        '<tr><td style="text-align: center;">end</td><td style="text-align: end;">of</td></tr></tbody></table></div>'
        '<p>last</p>',
    ),
    ("a | b\n--- | -", None),  # complete enough to be a table
    ("a | b\nc | d", "<p>a | b\nc | d</p>"),
    ("|\n|", "<p>|\n|</p>"),
    ("say\n> one\n> - two\n>\n>> three\nend", "<p>say</p><blockquote><p>one</p><ul><li>two</li></ul>"
     "<blockquote><p>three</p></blockquote></blockquote><p>end</p>"),
    ("***a*** and *b*", "<p><strong><em>a</em></strong> and <em>b</em></p>"),
    ("a\n---\nb --- c", "<p>a</p><hr><p>b --- c</p>"),
    ("**a **b** [c [d](https://e.example)", '<p>**a <strong>b</strong> [c <a href="https://e.example" target="_blank" '
     'rel="noopener noreferrer">d</a></p>'),
]  # fmt: skip


async def test_markdown_as_models_write_it(demo: DemoPage) -> None:
    """Also while it grows letter by letter; and each word that sounds is found in it."""
    found = await demo.page.evaluate(
        """async (texts) => {
          const { blocksOf, showRichText } = await import("/browser/rich-text.js");
          return texts.map((text) => {
            const whole = document.createElement("div");
            whole.append(...blocksOf(text).map(({ element }) => element));
            const growing = document.createElement("div");
            for (let end = 1; end <= text.length; end++) showRichText(growing, text.slice(0, end));
            return [whole.innerHTML, growing.innerHTML === whole.innerHTML];
          });
        }""",
        [text for text, _ in MARKDOWN],
    )
    box = '<div class="table" tabindex="0" role="group" aria-label="Table">'
    for (text, wanted), (shown, grew) in zip(MARKDOWN, found, strict=True):
        shown = shown.replace(box, '<div class="table">')
        assert wanted is None or shown == wanted, text
        assert grew, text
    assert "<table>" in next(shown for (text, _), (shown, _) in zip(MARKDOWN, found, strict=True) if "--- | -" in text)


async def test_words_that_sound_are_found_within_lists_and_tables(demo: DemoPage) -> None:
    found = await demo.page.evaluate(
        """async () => {
          const { showRichText } = await import("/browser/rich-text.js");
          const { markSpoken, markUnheard } = await import("/widget/spoken-word.js");
          const node = document.createElement("div");
          document.body.append(node);
          const table = "| four | five |\\n|---|---|\\n| six | seven |";
          showRichText(node, `1. One\\n   - two **three**\\n\\n${table}\\n\\n> eight\\n\\n---\\nnine`);
          const said = "One two three four five six seven eight nine".split(" ");
          const words = said.map((text, index) => ({ text, start_ms: 100 * index, end_ms: 100 * index + 90 }));
          const marked = words.map(({ start_ms: at }) => String(markSpoken(node, words, at)));
          markUnheard(node, words, 250);
          const texts = (name) => [...CSS.highlights.get(name)].map(String);
          const cut = [texts("cut"), texts("unheard")];
          markUnheard(node, words, null);
          const painted = [410, 480, 510].map((at) => (markSpoken(node, words, at), CSS.highlights.get("spoken")));
          markSpoken(node, []);
          node.remove();
          return [marked, said, cut, painted.map((one) => painted.indexOf(one)), CSS.highlights.has("spoken")];
        }"""
    )
    marked, said, cut, painted, left = found
    assert marked == said
    assert painted == [0, 0, 2]  # while a word sounds its mark stays the one that was painted
    assert not left
    assert cut[0] == ["three"]
    assert cut[1][0].split()[-1].endswith("nine")


async def test_no_text_takes_longer_to_show_than_its_length_accounts_for(demo: DemoPage) -> None:
    """What would take minutes if its time grew with the square of its length."""
    found = await demo.page.evaluate(
        """async () => {
          const { blocksOf } = await import("/browser/rich-text.js");
          const many = (piece, count = 200_000) => piece.repeat(count / piece.length);
          const stairs = Array.from({ length: 600 }, (_, step) => " ".repeat(step) + "- x").join("\\n");
          const texts = {
            strong: many("**a "), soft: many("*a "), code: many("` "), labels: many("["), links: many("[a](http://b"),
            addresses: "http://" + many(","), quotes: many(">"), quoted: many("> "), items: many("- "),
            numbers: many("1. a\\n"),
            rules: many("- ") + "x", spaces: many(" ") + "x", lines: "- a" + many("\\n") + "x", stairs,
            pairs: many("- a\\n\\n\\n\\n"),
            columns: many("|a", 50_000) + "\\n" + many("|-", 50_000) + "\\n" + many("|\\n", 100_000),
            bars: many("|\\n"), rows: many("a|b\\n"), dashes: "---" + many(" ") + "|",
          };
          const times = {};
          for (const [name, text] of Object.entries(texts)) {
            const begun = performance.now();
            blocksOf(text);
            times[name] = performance.now() - begun;
          }
          return times;
        }"""
    )
    assert not {name: ms for name, ms in found.items() if ms > 4000}


async def test_turns_are_judged_by_the_voice_where_the_server_can(demo: DemoPage) -> None:
    found = await demo.page.evaluate(
        """async () => {
          const { DEFAULTS, sessionConfig } = await import("/browser/settings.js");
          const capabilities = { output_modalities: [], voices: [], tasks: [], turn_detection: true };
          const silence = { ...capabilities, turn_detection_types: ["server_vad"] };
          const voice = { ...capabilities, turn_detection_types: ["server_vad", "semantic_vad"] };
          const turns = (changes, able) => sessionConfig({ ...DEFAULTS, ...changes }, able).turn_detection;
          return [turns({}, capabilities), turns({}, silence), turns({}, voice), turns({ turns: "low" }, voice),
            turns({ turns: "silence", silenceMs: 900 }, voice), turns({ mode: "hold" }, voice),
            turns({ overShortWords: false }, voice), turns({ murmurs: true }, { ...voice, backchannel: true })];
        }"""
    )
    common = {"threshold": 0.5, "interrupt_response": True, "interrupt_resume": True, "duck": True}
    by_silence = {"type": "server_vad", "silence_duration_ms": 500, **common}
    by_voice = {"type": "semantic_vad", "eagerness": "auto", "silence_duration_ms": None, **common}
    assert found == [
        *(by_silence, by_silence, by_voice, by_voice | {"eagerness": "low"}),
        *(by_silence | {"silence_duration_ms": 900}, None, by_voice | {"duck": False}),
        by_voice | {"backchannel": True},
    ]


async def test_the_example_page_of_the_client_library(demo: DemoPage) -> None:
    page = await demo.page.context.new_page()
    example = Path(__file__).parents[2] / "clients" / "js" / "example" / "index.html"
    server = demo.page.url
    await page.goto(f"{server}health?server={server}")  # of the server's origin, without the page's policy
    await page.set_content(example.read_text(encoding="utf-8"))
    await page.locator("#state", has_text="ready").wait_for()
    await page.locator("#talk").click()
    await page.locator("#state", has_text=re.compile("listening|hearing|opening")).wait_for()
    await page.close()
