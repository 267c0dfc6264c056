/* Against a server that echoes, at OMNI_WS_URL; skipped without one, or without WebSocket (Node before 22 hides it). */

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

import { Session, VoiceClient } from "../client.js";

const url = process.env.OMNI_WS_URL;
const missing = globalThis.WebSocket
  ? "OMNI_WS_URL is not set"
  : "this Node needs NODE_OPTIONS=--experimental-websocket";
const options = { skip: url && globalThis.WebSocket ? false : missing, timeout: 500_000 };

const told = (target, name, wanted = () => true) =>
  new Promise((resolve) => {
    const listener = ({ detail }) => {
      if (!wanted(detail)) return;
      target.removeEventListener(name, listener);
      resolve(detail);
    };
    target.addEventListener(name, listener);
  });

/* Sockets that can be cut, as a network does. */
const sockets = [];
class Cuttable extends (globalThis.WebSocket ?? Object) {
  constructor(...given) {
    super(...given);
    sockets.push(this);
  }
}

async function connected(more = {}) {
  const client = new VoiceClient({ url, WebSocket: Cuttable, ...more });
  const created = told(client.session, "created");
  client.open();
  return { client, created: await created };
}

async function ask(client, text) {
  const answered = told(client, "answered");
  await client.write(text);
  return (await answered).turn;
}

test("a text is answered", options, async () => {
  const { client, created } = await connected();
  assert.match(created.session_id, /^sess_/);
  const turn = await ask(client, "hello there");
  assert.equal(turn.answer.text, "hello there");
  assert.equal(turn.answer.state, "done");
  assert.equal(client.state, "ready");
  client.close();
  assert.equal(client.state, "ended");
});

test("speech is answered with sound", options, async () => {
  const { client } = await connected();
  let samples = 0;
  client.addEventListener("audio", ({ detail }) => (samples += detail.samples.length));
  const answered = told(client, "answered");
  client.say(new Int16Array(16_000).fill(1000));
  assert.equal((await answered).turn.answer.state, "done");
  assert.ok(samples > 1000, `${samples} samples`);
  client.close();
});

test("more sound at once than the server takes in one chunk is answered, over one connection", options, async () => {
  const before = sockets.length;
  const { client } = await connected();
  const answered = told(client, "answered");
  client.say(new Int16Array((4 << 19) + 1)); // the limit is 4 MiB
  assert.equal((await answered).turn.answer.state, "done");
  assert.equal(sockets.length - before, 1);
  client.close();
});

test("a connection that is cut is resumed, and what was said meanwhile arrives", options, async () => {
  const { client } = await connected();
  await ask(client, "one");
  const resumed = told(client.session, "resumed");
  const answered = told(client, "answered");
  sockets.at(-1).onclose({ code: 1006 }); // only the client sees a close; the server sees the new connection
  await client.write("two");
  await resumed;
  assert.equal((await answered).turn.answer.text, "two");
  client.close();
});

test("a question is asked again in other words", options, async () => {
  const { client } = await connected();
  const first = await ask(client, "one");
  await ask(client, "two");
  const answered = told(client, "answered");
  assert.equal(await client.resend(first, "uno"), true);
  assert.equal((await answered).turn.answer.text, "uno");
  assert.deepEqual(client.conversation.turns.map(({ dropped }) => dropped), [true, true, false]);
  client.close();
});

test("a new session knows nothing of the old one", options, async () => {
  const { client, created } = await connected();
  await ask(client, "one");
  const again = told(client.session, "created");
  client.startAnew();
  const { session_id: id, lost } = await again;
  assert.notEqual(id, created.session_id);
  assert.equal(lost, false);
  assert.equal((await ask(client, "two")).answer.text, "two");
  client.close();
});

/* A speaker that plays until it is flushed. */
class Playing extends EventTarget {
  ids = [];
  get playing() {
    return this.ids.length > 0;
  }
  play(id) {
    if (!this.ids.includes(id)) this.ids.push(id);
  }
  end() {}
  duck() {}
  flush() {
    for (const id of this.ids.splice(0)) this.dispatchEvent(new CustomEvent("flushed", { detail: { id, playedMs: 0 } }));
  }
}

test("pressing Stop when somebody begins to speak ends the answer that is playing, and the speech is still answered", options, async () => {
  const session = new Session(url, () => "", { WebSocket: Cuttable });
  const config = { input_audio: { format: "pcm16", sample_rate: 16_000, channels: 1 } };
  const { client } = await connected({ mode: "open", config, connect: () => ({ session, speaker: new Playing() }) });
  const speech = readFileSync(new URL("../../../tests/data/goforward.wav", import.meta.url)).subarray(44);
  const stream = Buffer.concat([Buffer.alloc(16_000), speech, Buffer.alloc(48_000)]);
  const say = (from, to) => {
    for (let place = from; place < to; place += 640) {
      client.session.sendChunk({ modality: "audio", payload: new Uint8Array(stream.subarray(place, Math.min(place + 640, to))) });
    }
  };
  say(0, stream.length);
  await told(client, "answered");
  for (const spokenMs of [700, 900, 1100]) {
    const stopAt = 16_000 + 32 * spokenMs;
    say(0, stopAt);
    client.interrupt(); // of this speech the page has not been told yet
    say(stopAt, stream.length);
    await told(client.session, "frame", ({ type }) => type === "speech_stopped");
    const { turn } = await told(client, "answered");
    assert.equal(turn, client.conversation.turns.at(-1));
    assert.deepEqual([turn.kind, turn.answer.finishReason], ["heard", "stop"]);
    assert.equal((await ask(client, "are you there?")).answer.text, "are you there?");
  }
  client.close();
});

test("a session that is closed as soon as it is open sets no timer again", options, async (context) => {
  const repeated = context.mock.method(globalThis, "setInterval");
  const cleared = context.mock.method(globalThis, "clearInterval");
  const client = new VoiceClient({ url, WebSocket: Cuttable });
  const open = told(client.session, "state", ({ state }) => state === "open" && (client.close(), true));
  client.open();
  await open;
  assert.equal(client.state, "ended");
  const running = repeated.mock.calls.map(({ result }) => result);
  const ended = cleared.mock.calls.map(({ arguments: [timer] }) => timer);
  assert.deepEqual(running.filter((timer) => !ended.includes(timer)), []);
});
