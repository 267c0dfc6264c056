/* Whose an answer is: the server says it by the names of turns, of what was said and of requests, and order decides nothing. */

import assert from "node:assert/strict";
import { afterEach, beforeEach, test } from "node:test";

import { Session, VoiceClient } from "../client.js";
import { FakeSocket } from "../testing/fake-socket.js";

const URL = "http://server.example/";
const CAPABILITIES = { turn_detection: true, transcripts: true, tools: true };

const clients = [];
afterEach(() => {
  for (const client of clients.splice(0)) client.close();
});

/* A client that listens, its connections, and a speaker that plays until it is flushed. */
function conversation({ mode = "open", tools = {} } = {}) {
  const sockets = [];
  class Socket extends FakeSocket {
    constructor() {
      super();
      sockets.push(this);
    }
  }
  class Playing extends EventTarget {
    ids = [];
    get playing() {
      return this.ids.length > 0;
    }
    get playedMs() {
      return this.playing ? 700 : undefined;
    }
    play(id) {
      if (!this.ids.includes(id)) this.ids.push(id);
    }
    end() {}
    lowered = [];
    duck(lowered) {
      this.lowered.push(lowered);
    }
    flush() {
      for (const id of this.ids.splice(0)) this.dispatchEvent(new CustomEvent("flushed", { detail: { id, playedMs: 700 } }));
    }
    attach() {}
  }
  const session = new Session(URL, () => "", { WebSocket: Socket });
  const speaker = new Playing();
  const client = new VoiceClient({ url: URL, mode, tools, connect: () => ({ session, speaker }) });
  clients.push(client);
  client.open();
  const begin = (more = {}) => {
    sockets.at(-1).onopen();
    sockets.at(-1).hear({ type: "session_created", session_id: "s", resume_token: "t", capabilities: CAPABILITIES, ...more });
  };
  begin();
  return { client, sockets, begin, speaker, hear: (frame) => sockets.at(-1).hear(frame) };
}

const json = (socket) => socket.sent.filter((frame) => typeof frame === "string").map((frame) => JSON.parse(frame));
const chunks = (socket) => json(socket).filter(({ type }) => type === "input_chunk");
const cancels = (socket) => json(socket).filter(({ type }) => type === "cancel").map((frame) => frame.request_id ?? "bare");

let number = 0;
beforeEach(() => (number = 0));
const output = (id, more) => ({ type: "output_chunk", sequence_id: number++, request_id: id, ...more });
const text = (id, words) => output(id, { modality: "text", text: words });
const sound = (id) => output(id, { modality: "audio", payload: Buffer.alloc(4800).toString("base64"), start_ms: 0 });
const final = (id, reason = "stop", more = {}) => output(id, { final: true, finish_reason: reason, ...more });
const started = (id, more) => ({ type: "response_started", request_id: id, trigger: "end_of_input", ...more });
const speech = (how, turnId, ms, id) => ({ type: `speech_${how}`, turn_id: turnId, audio_ms: ms, request_id: id });
const shown = ({ conversation: { turns } }) =>
  turns.filter(({ dropped }) => !dropped).map(({ kind, user, answer }) => [kind, user.text, answer.text, answer.state]);


// --- what is sent has a name

test("each turn of the page names its request, once in its first chunk and once in its last", async () => {
  const { client, sockets } = conversation();
  await client.write("Grüße");
  client.say(new Int16Array(80_000));
  assert.deepEqual(
    chunks(sockets[0]).map(({ ref, text: words, modality, payload, end_of_input: end }) => [ref, modality, words ?? payload.length, end]),
    [
      ["turn-0", "text", "Grüße", true],
      ["turn-1", "audio", Math.ceil((64 * 1024) / 3) * 4, false],
      ["turn-1", "audio", Math.ceil((160_000 % (64 * 1024)) / 3) * 4, true],
    ],
  );
  assert.equal(sockets[0].sent.filter((frame) => typeof frame !== "string").length, 1); // the piece between them
});

test("long text is cut between characters", async () => {
  const { client, sockets } = conversation();
  const words = "Grüße 👋 ".repeat(9000);
  await client.write(words);
  const whole = sockets[0].sent.map((frame) => {
    if (typeof frame !== "string") return new TextDecoder("utf-8", { fatal: true }).decode(frame.subarray(12));
    return JSON.parse(frame).type === "input_chunk" ? JSON.parse(frame).text : "";
  });
  assert.equal(whole.join(""), words);
});

test("a picture has the name of what is being said, or of the turn that begins next", async () => {
  const { client, hear, sockets } = conversation();
  client.show("image", new Uint8Array([1, 2, 3]));
  hear(started("r1", { ref: "turn-0" })); // a picture is enough to start
  hear(speech("started", "turn_a", 100, "r1"));
  client.show("image", new Uint8Array([4]));
  assert.deepEqual(chunks(sockets[0]).map(({ ref, payload }) => [ref, payload]), [["turn-0", "AQID"], ["turn-0", "BA=="]]);
  hear(speech("stopped", "turn_a", 900, "r1"));
  hear(text("r1", "A cat."));
  hear(final("r1"));
  assert.deepEqual(shown(client), [["heard", "", "A cat.", "done"]]);
});

// --- whose an answer is

test("what goes with a turn has its name and is asked again with it, also where that is given whole", async () => {
  const { client, begin, sockets } = conversation();
  client.addEventListener("turnstart", () => client.show("image", new Uint8Array([1, 2, 3])), { once: true });
  client.say(new Int16Array(4));
  const sent = (socket) => chunks(socket).map(({ ref, modality }) => [ref, modality]);
  assert.deepEqual(sent(sockets[0]), [["turn-0", "image"], ["turn-0", "audio"]]);
  begin(); // its session is lost
  assert.deepEqual(sent(sockets[0]).slice(2), [["turn-0", "image"], ["turn-0", "audio"]]);
});

test("what was said and opened no request waits for none", async () => {
  const { client, hear } = conversation();
  hear(speech("started", "turn_a", 96, null));
  hear(speech("stopped", "turn_a", 736, null));
  for (const [place, words] of ["one", "two", "three"].entries()) {
    await client.write(words);
    hear(started(`r${place}`, { ref: `turn-${place + 1}` }));
    hear(text(`r${place}`, words.toUpperCase()));
    hear(final(`r${place}`));
  }
  assert.deepEqual(shown(client), [
    ["heard", "", "", "failed"],
    ["written", "one", "ONE", "done"],
    ["written", "two", "TWO", "done"],
    ["written", "three", "THREE", "done"],
  ]);
  assert.equal(client.conversation.turns[0].answer.error, "This was not answered. Please say it again.");
  assert.equal(client.state, "ready");
});

test("speech of which the page learns behind its text keeps its own request", async () => {
  const { client, hear } = conversation();
  await client.write("What is 2+2?");
  hear(speech("started", "turn_a", 96, "r1"));
  hear(speech("stopped", "turn_a", 700, "r1"));
  hear(final("r1", "cancelled", { turn_id: "turn_a" }));
  hear(started("r2", { ref: "turn-0" }));
  hear(text("r2", "Four."));
  hear(final("r2", "stop", { ref: "turn-0" }));
  assert.deepEqual(shown(client), [["written", "What is 2+2?", "Four.", "done"], ["heard", "", "", "stopped"]]);
});

test("text that joined what was being said is one turn with it, and the next one has its own answer", async () => {
  const { client, hear } = conversation();
  const turn = await client.write("What is 2+2?");
  hear(speech("started", "turn_a", 96, "r1"));
  hear(started("r1", { ref: "turn-0", turn_id: "turn_a" }));
  assert.equal(client.heardTurn, null);
  hear(speech("stopped", "turn_a", 700, "r1"));
  hear(output("r1", { modality: "transcript", text: "tell me", turn_id: "turn_a" }));
  hear(text("r1", "Four."));
  hear(final("r1", "stop", { ref: "turn-0", turn_id: "turn_a" }));
  await client.write("and now?");
  hear(started("r2", { ref: "turn-2" }));
  hear(text("r2", "Now."));
  hear(final("r2"));
  assert.deepEqual(shown(client), [["written", "What is 2+2? tell me", "Four.", "done"], ["written", "and now?", "Now.", "done"]]);
  assert.equal(turn.answer.text, "Four.");
});

test("of two texts that are written quickly, the one that is refused fails and the other is answered", async () => {
  const { client, hear, sockets } = conversation();
  const errors = [];
  client.addEventListener("error", ({ detail }) => errors.push(detail.error.code));
  await client.write("one");
  await client.write("two");
  const [first] = chunks(sockets[0]);
  const refusal = { type: "error", error: { code: "engine_overloaded", message: "no", sequence_id: first.sequence_id, ref: "turn-0" } };
  hear(refusal);
  hear(started("r1", { ref: "turn-1" }));
  hear(refusal); // a resumed connection repeats it
  hear(text("r1", "TWO"));
  hear(final("r1"));
  assert.deepEqual(client.conversation.turns.map(({ answer }) => [answer.text, answer.finishReason]), [["", null], ["TWO", "stop"]]);
  assert.deepEqual(errors, []);
  await client.conversation.settled();
});

test("an answer says why it failed, or what was done otherwise", async () => {
  const { client, hear } = conversation();
  const failed = await client.write("one");
  hear(started("r1", { ref: "turn-0" }));
  hear({ type: "error", error: { code: "engine_overloaded", message: "Your quota is used up.", request_id: "r1", ref: "turn-0" } });
  hear(final("r1", "error"));
  assert.deepEqual([failed.answer.error, failed.answer.reason], ["engine_overloaded", "Your quota is used up."]);
  const cut = await client.write("two");
  hear(started("r2", { ref: "turn-1" }));
  hear(text("r2", "TWO"));
  hear(final("r2", "stop", { warnings: [{ code: "finish_reason", message: "content_filter", param: null }] }));
  assert.deepEqual([cut.answer.state, cut.answer.reason, cut.answer.warnings[0].code], ["done", "", "finish_reason"]);
});

test("a turn is over when its end is refused, and what the server has of it is ended and stopped", async () => {
  const { client, hear, sockets } = conversation({ mode: "hold" });
  client.addEventListener("turnstart", () => client.show("image", new Uint8Array(4)));
  const errors = [];
  client.addEventListener("error", ({ detail }) => errors.push(detail.error.code));
  const refuse = (chunk, code) => hear({ type: "error", error: { code, message: "no", sequence_id: chunk.sequence_id, ref: chunk.ref } });
  const seen = await client.write("what is this?");
  refuse(chunks(sockets[0])[0], "unsupported_modality"); // the text asks all the same
  assert.deepEqual([seen.answer.state, errors], ["thinking", ["unsupported_modality"]]);
  hear(started("r1", { ref: "turn-0" }));
  hear(text("r1", "I see nothing."));
  hear(final("r1"));
  assert.equal(seen.answer.state, "done");
  const unasked = await client.write("and this?");
  const [picture, words] = chunks(sockets[0]).slice(2);
  refuse(words, "invalid_value");
  assert.deepEqual([unasked.answer.state, unasked.answer.error], ["failed", "invalid_value"]);
  assert.equal(sockets[0].sent.at(-1)[3], 1); // a bare end
  hear(started("r2", { ref: picture.ref }));
  assert.deepEqual(cancels(sockets[0]), ["r2"]);
  hear(final("r2", "cancelled"));
  await client.conversation.settled();
});

test("a resumed connection tells of what was said before the text that was written meanwhile", async () => {
  const { client, sockets, hear } = conversation();
  sockets[0].onclose({ code: 1006 });
  await new Promise((resolve) => setImmediate(resolve));
  const turn = await client.write("are you there?");
  client.session.hurry();
  sockets[1].onopen();
  hear({ type: "session_resumed", session_id: "s", resume_token: "u", next_sequence_id: 0, replayed: 3 });
  for (let again = 0; again < 2; again++) {
    hear(speech("started", "turn_a", 96, "r1"));
    hear(speech("stopped", "turn_a", 700, "r1"));
    hear(started("r1", { turn_id: "turn_a", trigger: "vad" }));
  }
  hear(text("r1", "You said something."));
  hear(final("r1"));
  hear(started("r2", { ref: turn.ref }));
  hear(text("r2", "Yes."));
  hear(final("r2"));
  assert.deepEqual(shown(client), [["written", "are you there?", "Yes.", "done"], ["heard", "", "You said something.", "done"]]);
});

test("a session that begins anew is asked under the same names", async () => {
  const { client, sockets, begin, hear } = conversation();
  await client.write("one");
  hear(final("gone", "stop", { ref: "turn-0" }));
  await client.write("two");
  sockets[0].onclose({ code: 1006 });
  await new Promise((resolve) => setImmediate(resolve));
  client.session.hurry();
  begin({ session_id: "other" });
  assert.deepEqual(chunks(sockets[1]).map(({ ref, sequence_id: place }) => [ref, place]), [["turn-1", 0]]);
  hear(started("r1", { ref: "turn-1" }));
  hear({ ...text("r1", "TWO"), sequence_id: 0 });
  assert.deepEqual(shown(client)[1], ["written", "two", "TWO", "speaking"]);
});

test("a session that begins anew knows nothing of a call that was half made", async () => {
  const { client, begin, hear } = conversation();
  const turn = await client.write("and now?");
  hear(started("r1", { ref: "turn-0" }));
  hear(output("r1", { modality: "tool_call", index: 0, id: "call_1", name: "dice", arguments: '{"sides":' }));
  begin();
  hear(started("r2", { ref: "turn-0" }));
  hear(output("r2", { modality: "tool_call", index: 0, id: "call_2", name: "dice", arguments: '{"sides":6}' }));
  assert.deepEqual(turn.answer.calls, [{ id: "call_2", name: "dice", arguments: '{"sides":6}' }]);
});

test("what is written down late goes to its turn, and leaves the sound to the answer of now", () => {
  const { client, hear } = conversation();
  hear(speech("started", "turn_a", 0, "r1"));
  hear(speech("stopped", "turn_a", 700, "r1"));
  hear(final("r1", "cancelled", { turn_id: "turn_a" }));
  hear(speech("started", "turn_b", 900, "r2"));
  hear(speech("stopped", "turn_b", 1700, "r2"));
  hear(started("r2", { turn_id: "turn_b" }));
  hear(output("r1", { modality: "transcript", text: "My name is Robert.", late: true, turn_id: "turn_a" }));
  client.conversation.apply({ type: "audio", samples: new Int16Array(1), startMs: 0 }); // bare sound has no name
  hear(text("r2", "Robert."));
  const [first, second] = client.conversation.turns;
  assert.deepEqual([first.user.text, second.answer.text], ["My name is Robert.", "Robert."]);
  assert.deepEqual([first, second].map(({ at }) => at.firstAudio !== null), [false, true]);
});

// --- servers that name nothing

test("an older server's answers go to what was asked, and ends without a beginning to what was said", async () => {
  const { client, hear } = conversation();
  hear({ type: "speech_started", audio_ms: 96 });
  hear({ type: "speech_stopped", audio_ms: 736 }); // opened no request
  for (const [place, words] of ["one", "two"].entries()) {
    await client.write(words);
    hear(started(`r${place}`));
    hear(text(`r${place}`, words.toUpperCase()));
    hear(final(`r${place}`));
  }
  assert.deepEqual(shown(client).slice(1), [["written", "one", "ONE", "done"], ["written", "two", "TWO", "done"]]);
});

test("an older server's first frame has the number of a chunk, which is one of a turn, or of the open microphone", async () => {
  const { client, hear, sockets } = conversation();
  client.session.sendChunk({ modality: "audio", payload: new Uint8Array(2) });
  hear({ type: "speech_started", audio_ms: 96 });
  hear({ type: "speech_stopped", audio_ms: 736 });
  await client.write("one");
  hear(started("r1", { sequence_id: 0, trigger: "vad" }));
  hear(started("r2", { sequence_id: chunks(sockets[0])[0].sequence_id }));
  hear(final("r1", "cancelled"));
  hear(text("r2", "ONE"));
  assert.deepEqual(shown(client), [["heard", "", "", "stopped"], ["written", "one", "ONE", "speaking"]]);
});

// --- Stop

test("Stop names each answer that runs, or sounds, or comes later, and nothing else", async () => {
  const { client, hear, sockets } = conversation();
  await client.write("one");
  hear(started("A", { ref: "turn-0" }));
  hear(sound("A"));
  hear(final("A"));
  hear(speech("started", "turn_a", 100, "B")); // flushes what sounds
  hear(speech("stopped", "turn_a", 900, "B"));
  hear(started("B", { turn_id: "turn_a" }));
  hear(sound("B"));
  hear(final("B"));
  hear(started("C", { trigger: "greeting" }));
  hear(sound("C"));
  assert.deepEqual(cancels(sockets[0]), []);
  client.say(new Int16Array(2)); // stops B and C; the server has not named this one yet
  assert.deepEqual(cancels(sockets[0]), ["B", "C"]);
  hear(speech("started", "turn_b", 2000, "D"));
  client.interrupt();
  assert.deepEqual(cancels(sockets[0]), ["B", "C"]);
  hear(started("E", { ref: "turn-3" }));
  assert.deepEqual(cancels(sockets[0]), ["B", "C", "E"]);
  hear(final("E", "cancelled"));
  hear(speech("stopped", "turn_b", 2900, "D"));
  hear(text("D", "I hear you."));
  hear(final("D"));
  assert.deepEqual(shown(client).at(-1), ["heard", "", "I hear you.", "done"]);
});

test("an answer that speech holds is stopped by its name, and the text behind it is answered", async () => {
  const { client, hear, sockets } = conversation();
  await client.write("count");
  hear(started("A", { ref: "turn-0" }));
  hear(sound("A"));
  hear(speech("started", "turn_a", 100, "B"));
  assert.equal(client.conversation.turns[0].answer.state, "held");
  await client.write("stop counting"); // while the answer goes on behind a cough
  assert.deepEqual(cancels(sockets[0]), ["A", "B"]);
  hear(final("B"));
  hear(sound("A"));
  hear(started("C", { ref: "turn-2" }));
  hear(final("A", "cancelled"));
  hear(text("C", "Stopped."));
  hear(final("C"));
  assert.deepEqual(shown(client).map(([kind, , words, state]) => [kind, words, state]), [
    ["written", "", "stopped"],
    ["heard", "", "stopped"],
    ["written", "Stopped.", "done"],
  ]);
});

test("before a question is asked again the answers end by their names", async () => {
  const { client, hear, sockets } = conversation();
  const turn = await client.write("one");
  hear(started("A", { ref: "turn-0" }));
  hear(sound("A"));
  hear(speech("started", "turn_a", 100, "B"));
  const asked = client.resend(turn, "uno");
  assert.deepEqual(cancels(sockets[0]), ["A", "B"]);
  hear(final("A", "cancelled"));
  hear(final("B", "cancelled"));
  await new Promise((resolve) => setImmediate(resolve));
  hear({ type: "history_truncated", request_id: "A", dropped_requests: 2 });
  assert.equal(await asked, true);
});

test("what is written while a question is taken back stays", async () => {
  const { client, hear } = conversation();
  const turn = await client.write("one");
  hear(started("A", { ref: "turn-0" }));
  hear(final("A"));
  const asked = client.resend(turn, "uno");
  await new Promise((resolve) => setImmediate(resolve));
  await client.write("two");
  hear({ type: "history_truncated", request_id: "A", dropped_requests: 1 });
  assert.equal(await asked, true);
  assert.deepEqual(client.conversation.turns.map(({ user, dropped }) => [user.text, dropped]), [
    ["one", true],
    ["two", false],
    ["uno", false],
  ]);
});

// --- what may interrupt, and may not

/* An answer that sounds. */
async function speaking() {
  const found = conversation();
  await found.client.write("one");
  found.hear(started("A", { ref: "turn-0" }));
  found.hear(text("A", "ONE"));
  found.hear(sound("A"));
  return found;
}
const uncertain = (turnId, ms) => ({ ...speech("started", turnId, ms, null), certain: false });

test("an open microphone says that this client can lower its sound", () => {
  const { sockets } = conversation();
  const [{ turn_detection: detection }] = json(sockets[0]).filter(({ type }) => type === "session_config");
  assert.deepEqual(detection, { type: "server_vad", interrupt_response: true, interrupt_resume: true, duck: true });
});

test("what is dismissed lowers the sound for a while, and is no turn", async () => {
  const { client, hear, speaker } = await speaking();
  const states = [];
  client.addEventListener("change", () => states.push(client.state));
  hear(uncertain("turn_a", 100));
  assert.deepEqual([speaker.lowered, client.state, client.heardTurn], [[true], "ducked", null]);
  hear(sound("A")); // goes on
  hear(speech("dismissed", "turn_b", 50)); // another one
  assert.equal(client.state, "ducked");
  hear(speech("dismissed", "turn_a", 100));
  assert.deepEqual([speaker.lowered, client.state, speaker.ids], [[true, false], "speaking", [0]]);
  assert.ok(!states.includes("hearing"));
  assert.deepEqual(shown(client), [["written", "one", "ONE", "speaking"]]);
});

test("what is confirmed interrupts from where it began, and the next answer is as loud as before", async () => {
  const { client, hear, speaker } = await speaking();
  const kept = [];
  client.talk.samplesBetween = (from, to) => (kept.push([from, to]), []);
  hear(uncertain("turn_a", 100));
  hear(speech("confirmed", "turn_a", 100, "B"));
  assert.deepEqual([speaker.lowered, client.state, speaker.ids], [[true, false], "hearing", []]);
  assert.equal(client.conversation.turns[0].answer.state, "held");
  hear(speech("stopped", "turn_a", 1500, "B"));
  hear(final("A", "cancelled"));
  hear(started("B", { turn_id: "turn_a" }));
  hear(text("B", "Yes?"));
  hear(final("B"));
  assert.deepEqual(shown(client).map(([kind, , words, state]) => [kind, words, state]), [
    ["written", "ONE", "stopped"],
    ["heard", "Yes?", "done"],
  ]);
  assert.deepEqual(kept, [[100, 1500]]);
});

test("a resumed connection decides nothing, and what it repeats is not heard again", async () => {
  const { client, hear, sockets, speaker } = await speaking();
  const resume = async () => {
    sockets.at(-1).onclose({ code: 1006 });
    await new Promise((resolve) => setImmediate(resolve));
    client.session.hurry();
    sockets.at(-1).onopen();
    hear({ type: "session_resumed", session_id: "s", resume_token: "u", next_sequence_id: 1, replayed: 0 });
  };
  hear(uncertain("turn_a", 100));
  await resume();
  assert.deepEqual([speaker.lowered, client.state], [[true], "ducked"]);
  const rest = [uncertain("turn_a", 100), speech("confirmed", "turn_a", 100, "B"), speech("stopped", "turn_a", 900, "B")];
  for (const frame of rest) hear(frame);
  await resume();
  for (const frame of rest) hear(frame);
  assert.equal(speaker.lowered.at(-1), false);
  assert.equal(client.conversation.turns.length, 2);
});

test("sound that a server sends again, as it did not know of it, is heard once", async () => {
  const { client, hear, sockets } = conversation();
  Object.defineProperty(client.sound, "rate", { value: 24_000 });
  Object.defineProperty(client.sound, "context", { value: { state: "running" } });
  client.sound.dispatchEvent(new Event("change"));
  await client.write("one");
  hear(started("A", { ref: "turn-0" }));
  hear(sound("A"));
  const [turn] = client.conversation.turns;
  const heard = [];
  client.addEventListener("audio", ({ detail: { samples } }) => heard.push(samples.length));
  const piece = (startMs) => hear({ ...sound(turn.requestId), start_ms: startMs });
  piece(100);
  sockets.at(-1).onclose({ code: 1006 });
  await new Promise((resolve) => setImmediate(resolve));
  client.session.hurry();
  sockets.at(-1).onopen();
  hear({ type: "session_resumed", session_id: "s", resume_token: "u", next_sequence_id: 1, replayed: 0 });
  piece(100);
  piece(150);
  piece(200);
  assert.deepEqual(heard, [2400, 1200, 2400]);
});

test("a session that begins anew has no sound to lower", async () => {
  const { client, hear, begin, sockets, speaker } = await speaking();
  hear(uncertain("turn_a", 100));
  sockets[0].onclose({ code: 1006 });
  await new Promise((resolve) => setImmediate(resolve));
  client.session.hurry();
  begin({ session_id: "other" });
  assert.deepEqual(speaker.lowered, [true, false]);
});

// --- results of tools

const CALL = { modality: "tool_call", index: 0, id: "call_1", name: "weather", arguments: "{}" };
const TOOLS = { weather: { run: () => "rain" } };

async function calling() {
  const found = conversation({ tools: TOOLS });
  const { client, hear } = found;
  client.talk.phase = "listening";
  await client.write("Will it rain?");
  hear(started("r1", { ref: "turn-0" }));
  hear(output("r1", CALL));
  hear(final("r1", "tool_calls", { ref: "turn-0" }));
  await new Promise((resolve) => setImmediate(resolve));
  return found;
}

test("the results of tools do not end what somebody begins to say, and are one turn with it", async () => {
  const { client, hear, sockets } = await calling();
  const { tool_call_id: id, ref, end_of_input: end } = chunks(sockets[0]).at(-1);
  assert.deepEqual([id, ref, end], ["call_1", "turn-1", false]);
  hear(speech("started", "turn_a", 100, "r2"));
  hear(started("r2", { ref: "turn-1", turn_id: "turn_a" }));
  hear(speech("stopped", "turn_a", 900, "r2"));
  hear(output("r2", { modality: "transcript", text: "and tomorrow?" }));
  hear(text("r2", "Rain on both days."));
  hear(final("r2"));
  assert.deepEqual(shown(client).slice(1), [["heard", "and tomorrow?", "Rain on both days.", "done"]]);
});

test("results that come when what was being said is over are a turn of their own", async () => {
  const found = conversation({ tools: { weather: { run: () => new Promise((resolve) => (found.reply = resolve)) } } });
  const { client, hear, sockets } = found;
  client.talk.phase = "listening";
  await client.write("Will it rain?");
  hear(started("r1", { ref: "turn-0" }));
  hear(output("r1", CALL));
  hear(final("r1", "tool_calls"));
  hear(speech("started", "turn_a", 100, "r2"));
  found.reply("rain"); // the server has heard the end of it
  await new Promise((resolve) => setImmediate(resolve));
  assert.equal(chunks(sockets[0]).at(-1).ref, "turn-1");
  hear(speech("stopped", "turn_a", 900, "r2"));
  hear(started("r2", { turn_id: "turn_a" }));
  hear(text("r2", "I am looking."));
  hear(final("r2"));
  hear(started("r3", { ref: "turn-1" }));
  hear(text("r3", "It rains."));
  hear(final("r3"));
  assert.deepEqual(shown(client).slice(1), [["heard", "", "I am looking.", "done"], ["tool", "", "It rains.", "done"]]);
});

test("results whose call the server has forgotten are told in their turn", async () => {
  const { client, hear, sockets } = await calling();
  const { sequence_id: place, ref } = chunks(sockets[0]).at(-1);
  hear({ type: "error", error: { code: "session_conflict", param: "tool_call_id", message: "no", sequence_id: place, ref } });
  const [, tool] = client.conversation.turns;
  assert.deepEqual([tool.kind, tool.answer.state, tool.answer.error], ["tool", "failed", "session_conflict"]);
});

test("the result of an async tool is sent when it is there, by itself, and told in a turn of its own", async () => {
  const replies = {};
  const run = (name) => () => new Promise((resolve) => (replies[name] = resolve));
  const found = conversation({ tools: { weather: { run: run("weather"), async: true }, dice: { run: run("dice") } } });
  const { client, hear, sockets } = found;
  await client.write("Will it rain?");
  hear(started("r1", { ref: "turn-0" }));
  hear(output("r1", CALL));
  hear(output("r1", { ...CALL, index: 1, id: "call_2", name: "dice" }));
  hear(final("r1", "tool_calls", { ref: "turn-0" }));
  replies.dice("6");
  await new Promise((resolve) => setImmediate(resolve));
  assert.deepEqual(chunks(sockets[0]).at(-1).tool_call_id, "call_2");
  hear(started("r2", { ref: "turn-1" }));
  hear(text("r2", "Six."));
  hear(final("r2"));
  hear(speech("started", "turn_a", 100, "r3"));
  replies.weather("rain");
  await new Promise((resolve) => setImmediate(resolve));
  const { tool_call_id: id, ref, end_of_input: end } = chunks(sockets[0]).at(-1);
  assert.deepEqual([id, ref, end], ["call_1", "turn-3", false]);
  hear(speech("stopped", "turn_a", 900, "r3"));
  hear(started("r3", { turn_id: "turn_a" }));
  hear(text("r3", "Fine."));
  hear(final("r3"));
  hear(started("r4", { ref: "turn-3", trigger: "telling" }));
  hear(text("r4", "It rains."));
  hear(final("r4"));
  const [, ...told] = shown(client);
  assert.deepEqual(told, [["tool", "", "Six.", "done"], ["heard", "", "Fine.", "done"], ["tool", "", "It rains.", "done"]]);
});

test("what the server says unasked is an answer to nothing", () => {
  const { client, hear } = conversation();
  hear(speech("started", "turn_a", 100, "A"));
  hear(speech("stopped", "turn_a", 900, "A"));
  hear(started("A", { turn_id: "turn_a" }));
  hear(final("A"));
  for (const trigger of ["filler", "idle", "telling"]) {
    hear(started(trigger, { trigger }));
    hear(text(trigger, "One moment."));
    const turn = client.conversation.turns.at(-1);
    assert.deepEqual([turn.kind, turn.user.done, turn.answer.text], ["greeting", true, "One moment."]);
    hear(final(trigger));
  }
  assert.equal(client.conversation.current, null);
});

test("a model that calls tools without end gets no more results, also if the server speaks between", async () => {
  const { client, hear, sockets } = conversation({ tools: TOOLS });
  await client.write("Will it rain?");
  for (let call = 0; call < 9; call++) {
    hear(started(`r${call}`, { ref: chunks(sockets[0]).at(-1).ref }));
    hear(output(`r${call}`, CALL));
    hear(final(`r${call}`, "tool_calls"));
    hear(started(`f${call}`, { trigger: "filler" }));
    hear(text(`f${call}`, "One moment."));
    hear(final(`f${call}`));
    await new Promise((resolve) => setImmediate(resolve));
  }
  assert.equal(chunks(sockets[0]).filter(({ tool_call_id: id }) => id).length, 5);
});
