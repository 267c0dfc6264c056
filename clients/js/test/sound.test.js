/* Sound that cannot be had is told; a microphone listens when it hears; and of a long answer nothing is left out. */

import assert from "node:assert/strict";
import { afterEach, beforeEach, mock, test } from "node:test";
import { FakeSocket } from "../testing/fake-socket.js";

let added = []; // addresses that were asked for
let refusing = () => false;
let track;
let ports = [];

class Context extends EventTarget {
  sampleRate = 48_000;
  state = "running";
  currentTime = 0;
  audioWorklet = {
    addModule: async (address) => {
      added.push(address);
      if (refusing(address)) throw new DOMException("no", "AbortError");
    },
  };
  async resume() {}
  async close() {
    this.state = "closed";
  }
}
globalThis.AudioContext = Context;
globalThis.MediaStreamAudioSourceNode = globalThis.AudioWorkletNode = class {
  port = { postMessage() {} };
  constructor() {
    ports.push(this.port);
  }
  connect() {}
  disconnect() {}
};
const { Sound, VoiceClient } = await import("../client.js");
const { CallSpeaker } = await import("../client/call-speaker.js");
const { PlayoutBuffer } = await import("../client/playback-worklet.js");

const settled = () => new Promise((resolve) => setImmediate(resolve));
let socket;
class Socket extends FakeSocket {
  constructor() {
    super();
    socket = this;
  }
}

let client;
let errors;
beforeEach(() => {
  [added, ports, refusing] = [[], [], () => false];
  const getUserMedia = async () => {
    track = { stop() {} };
    return { getAudioTracks: () => [track], getTracks: () => [track] };
  };
  Object.defineProperty(globalThis, "navigator", { value: { mediaDevices: { getUserMedia } }, configurable: true });
  mock.timers.enable({ apis: ["setTimeout", "setInterval"] });
  errors = [];
  client = new VoiceClient({ url: "http://server.example/", WebSocket: Socket });
  client.addEventListener("error", ({ detail }) => errors.push([detail.error.code, detail.cause?.name]));
  client.open();
  const capabilities = { turn_detection: true, transcripts: true, input_modalities: ["audio", "text"], tasks: ["chat"] };
  socket.hear({ type: "session_created", session_id: "s", capabilities });
});
afterEach(() => {
  client.close();
  mock.timers.reset();
});

/* 20 ms of the microphone. */
function hear(peak) {
  for (const { onmessage } of ports) onmessage?.({ data: { type: "none", samples: new Int16Array(960), peak } });
}

// --- where the worklets come from

const ours = (address) => address.startsWith("file:");
const copies = (address) => address.startsWith("blob:");
const served = (address) => address.startsWith("http://server.example/client/");
for (const [name, bad, kinds] of [
  ["they stand beside the module", () => false, [ours]],
  ["a bundler has lost them", ours, [ours, copies]],
  ["and the page's policy forbids copies", (address) => ours(address) || copies(address), [ours, copies, served]],
]) {
  test(`the worklets are had where ${name}`, async () => {
    refusing = bad;
    await new Sound("http://server.example/").wake();
    const found = added.map((address) => kinds.findIndex((is) => is(address)));
    assert.deepEqual(found.toSorted(), kinds.flatMap((_, place) => [place, place]));
  });
}

test("they are asked for again under other addresses", async () => {
  refusing = () => true;
  const sound = new Sound("http://server.example/");
  await assert.rejects(sound.wake(), { name: "SoundUnavailable" });
  refusing = (address) => !address.includes("?again=");
  await sound.wake();
  const again = added.filter((address) => address.includes("?again="));
  assert.equal(again.length, 2);
  assert.ok(again.every(served));
});

test("a place that does not reply is given up for the next", async () => {
  const hung = [];
  const slow = new Sound("http://server.example/");
  const before = globalThis.AudioContext;
  globalThis.AudioContext = class extends Context {
    audioWorklet = { addModule: (address) => (hung.push(address), ours(address) ? new Promise(() => {}) : Promise.resolve()) };
  };
  try {
    const waking = slow.wake();
    await settled();
    assert.ok(hung.every(ours));
    mock.timers.tick(10_000);
    await waking;
    assert.equal(hung.filter(copies).length, 2);
  } finally {
    globalThis.AudioContext = before;
  }
});

test("what was closed has no device, and takes another with worklets of its own", async () => {
  const sound = new Sound("http://server.example/");
  let late;
  const first = await sound.wake();
  sound.close();
  assert.deepEqual([first.state, first.onstatechange, sound.rate, sound.locked], ["closed", null, null, false]);
  sound.close();
  await sound.wake();
  assert.equal(added.length, 4);
  // What a closed one still loads is not there for the next.
  sound.close();
  const before = globalThis.AudioContext;
  globalThis.AudioContext = class extends Context {
    audioWorklet = { addModule: () => new Promise((done) => (late = done)) };
  };
  sound.wake().catch(() => {});
  globalThis.AudioContext = before;
  sound.close();
  late();
  await settled();
  await sound.wake();
  assert.equal(added.length, 6);
});

test("a client that was closed is heard and speaks anew", async () => {
  await client.listen();
  const nodes = ports.length;
  client.close();
  assert.equal(client.sound.context, null);
  client.open();
  socket.hear({ type: "session_created", session_id: "t", capabilities: { turn_detection: true, input_modalities: ["audio"], tasks: ["chat"] } });
  await client.listen();
  assert.equal(ports.length, 2 * nodes); // the speaker's, the microphone's and its source's
  assert.equal(client.state, "opening");
  hear(0.1);
  assert.equal(client.state, "listening");
});

test("a client that is closed while it is about to listen opens nothing, and tells no error", async () => {
  let asked = 0;
  let given;
  let stopped = 0;
  navigator.mediaDevices.getUserMedia = () => {
    asked += 1;
    return new Promise((give) => (given = give));
  };
  const waking = client.listen(); // the worklets are being loaded
  client.close();
  await waking;
  assert.deepEqual([asked, errors], [0, []]);
  client.open();
  socket.hear({ type: "session_created", session_id: "t", capabilities: { turn_detection: true, input_modalities: ["audio"], tasks: ["chat"] } });
  const listening = client.listen();
  await settled();
  assert.equal(asked, 1); // the browser asks the person
  client.close();
  track = { stop: () => (stopped += 1) };
  given({ getAudioTracks: () => [track], getTracks: () => [track] });
  await listening;
  assert.deepEqual([stopped, client.microphone.isOpen, errors], [1, false, []]);
});

test("a client that is closed while it is about to write tells no error of its sound", async () => {
  const writing = client.write("hello"); // the worklets are being loaded
  client.close();
  await writing;
  assert.deepEqual(errors, []);
});

test("the track of a call waits for the sound that is there, where one was closed", () => {
  const before = [globalThis.MediaStreamAudioSourceNode, globalThis.GainNode, globalThis.Audio];
  const joined = [];
  class Node {
    constructor(context) {
      this.context = context;
    }
    gain = { value: 1 };
    connect(next) {
      if (next?.context && next.context !== this.context) throw new DOMException("another context", "InvalidAccessError");
      joined.push(this.context);
    }
    disconnect() {}
  }
  globalThis.MediaStreamAudioSourceNode = globalThis.GainNode = Node;
  globalThis.Audio = class {
    async play() {}
  };
  try {
    const [first, second] = [new Context(), new Context()];
    const sound = { context: first };
    const speaker = new CallSpeaker({ sound }, new EventTarget());
    speaker.attach(first);
    sound.context = second; // whose worklets are being loaded
    joined.length = 0;
    speaker.connect({});
    assert.deepEqual(joined, []);
    speaker.attach(second);
    assert.deepEqual(joined, [second, second, second]); // the gain to the device and the worklet, the track to the gain
  } finally {
    [globalThis.MediaStreamAudioSourceNode, globalThis.GainNode, globalThis.Audio] = before;
  }
});

// --- what cannot be had is told

test("listen rejects and error fires where there is no sound", async () => {
  refusing = () => true;
  await assert.rejects(client.listen(), { name: "SoundUnavailable" });
  assert.deepEqual(errors, [["SoundUnavailable", "SoundUnavailable"]]);
  assert.equal(client.state, "ready");
});

test("a text is written all the same, and its answer is said to be silent", async () => {
  refusing = () => true;
  const turn = await client.write("hello");
  assert.deepEqual([turn.answer.state, errors], ["thinking", [["SoundUnavailable", "SoundUnavailable"]]]);
});

test("listen rejects and error fires where there is no microphone", async () => {
  navigator.mediaDevices.getUserMedia = async () => {
    throw new DOMException("no", "NotAllowedError");
  };
  await assert.rejects(client.listen(), { name: "NotAllowedError" });
  assert.deepEqual(errors, [["NotAllowedError", "NotAllowedError"]]);
});

test("listen rejects and error fires where worklets were loaded that are not these", async () => {
  const before = globalThis.AudioWorkletNode;
  globalThis.AudioWorkletNode = class {
    constructor() {
      throw new DOMException("no such processor", "InvalidStateError");
    }
  };
  try {
    await assert.rejects(client.listen(), { name: "InvalidStateError" });
    assert.ok(errors.length >= 1 && errors.every(([code]) => code === "InvalidStateError"));
  } finally {
    globalThis.AudioWorkletNode = before;
  }
});

test("a microphone that goes away is an error", async () => {
  await client.listen();
  track.onended();
  assert.deepEqual([errors, client.state], [[["LostError", "LostError"]], "ready"]);
});

// --- listening

test("it listens when the first samples with a level have arrived, and is opening before", async () => {
  const states = [];
  client.addEventListener("change", () => states.at(-1) !== client.state && states.push(client.state));
  await client.listen();
  for (const peak of [0, 0, 0]) hear(peak);
  assert.deepEqual(states, ["opening"]);
  hear(1 / 32768);
  assert.deepEqual(states, ["opening", "listening"]);
  hear(0);
  assert.equal(client.state, "listening"); // silence later is silence
  client.talk.stop();
  await client.listen();
  assert.equal(client.state, "opening"); // it was opened anew
});

test("what a microphone that wakes up gives is sent, so that the server's clock runs", async () => {
  await client.listen();
  socket.sent = [];
  hear(0);
  assert.equal(socket.sent.length, 1);
});

test("a microphone without a level for 3 s is told, not sooner, and a muted one never", async () => {
  let told = 0;
  client.talk.addEventListener("silent", () => (told += 1));
  await client.listen();
  mock.timers.tick(2999);
  assert.equal(told, 0);
  mock.timers.tick(1);
  assert.equal(told, 1);
  client.talk.stop();
  await client.listen();
  client.talk.mute(true);
  assert.equal(client.state, "muted");
  socket.hear({ type: "pong" });
  mock.timers.tick(7000);
  socket.hear({ type: "pong" });
  client.talk.mute(false);
  assert.equal(client.state, "opening");
  hear(0.5);
  mock.timers.tick(7000);
  assert.deepEqual([told, client.state], [1, "listening"]);
});

test("a turn of the button that no session takes any more is over", async () => {
  client.wantedMode = "hold";
  client.configure();
  await client.listen();
  hear(0.5);
  assert.equal(client.state, "hearing");
  socket.onclose({ code: 1009 });
  await settled();
  const [turn] = client.conversation.turns;
  assert.deepEqual([client.talk.phase, turn.answer.state, turn.answer.error], ["off", "failed", "payload_too_large"]);
});

test("the end of a turn has room where the last of its sound has none", async () => {
  client.wantedMode = "hold";
  client.configure();
  await client.listen();
  hear(0.5);
  while (client.session.sendChunk({ modality: "audio", payload: new Uint8Array(1 << 16), turn: 0 }));
  while (client.session.sendChunk({ modality: "audio", payload: new Uint8Array(100), turn: 0 }));
  client.talk.release(0);
  client.talk.press(0);
  for (let number = 0; number < 3; number++) hear(0.5);
  assert.equal(client.talk.phase, "off");
  assert.equal(client.conversation.turns[0].answer.state, "thinking");
});

// --- long answers

test("with the button the server is asked not to run ahead by more than two minutes", () => {
  const configured = () => JSON.parse(socket.sent.filter((frame) => typeof frame === "string" && frame.includes("session_config")).at(-1));
  assert.equal(configured().max_lead_ms, null); // with turn detection the server has its own choice
  client.wantedMode = "hold";
  client.configure();
  assert.equal(configured().max_lead_ms, 120_000);
});

function player(rate) {
  const reports = [];
  return { reports, buffer: new PlayoutBuffer(rate, ({ type, id }) => reports.push([type, id])) };
}

test("all of a long answer is played, and beyond half an hour it ends early, as a whole", () => {
  const rate = 10;
  const { reports, buffer } = player(rate);
  const minute = (value) => new Int16Array(rate * 60).fill(value);
  for (let number = 0; number < 30; number++) buffer.push(1, minute(1), number * rate * 60);
  assert.deepEqual(reports, []);
  buffer.push(1, Int16Array.of(2), 30 * 60 * rate);
  buffer.push(1, minute(3), 30 * 60 * rate + 1);
  assert.deepEqual(reports, [["overflow", 1]]);
  const out = new Float32Array(rate * 60);
  const heard = new Set();
  for (let number = 0; number < 40; number++) {
    buffer.pull(out);
    for (const sample of out) heard.add(Math.round(sample * 32768));
    buffer.push(1, minute(4), 0); // there is room again, and a hole before it
  }
  assert.deepEqual([...heard].toSorted(), [0, 1]);
  assert.deepEqual(reports, [["overflow", 1], ["started", 1], ["ended", 1]]);
});

test("sound is lowered by 15 dB and raised again, on a slope, without a hole and without a sample less", () => {
  const rate = 8000;
  const { buffer } = player(rate);
  const heard = (count) => {
    const out = new Float32Array(count);
    buffer.pull(out);
    return out;
  };
  const decibels = (sample) => Math.round(20 * Math.log10(sample / 0.5) * 10) / 10;
  const steepest = (samples) => Math.max(...samples.subarray(1).map((sample, place) => Math.abs(sample - samples[place])));
  buffer.push(1, new Int16Array(rate).fill(16_384));
  heard(800);
  buffer.duck(true);
  const down = heard(400);
  assert.deepEqual([decibels(down[0]) <= 0, decibels(down[160]), decibels(down[399])], [true, -15, -15]);
  buffer.duck(true);
  assert.equal(decibels(heard(1)[0]), -15);
  buffer.duck(false);
  const up = heard(400);
  assert.deepEqual([decibels(up[160]), decibels(up[399])], [0, 0]);
  assert.ok(steepest(down) < 0.003 && steepest(up) < 0.003);
  assert.equal(buffer.current.played, 1601);
});

test("what was lowered for one answer is as loud as before in the next, from its first sample", () => {
  const rate = 8000;
  const { buffer } = player(rate);
  const out = new Float32Array(800);
  buffer.push(1, new Int16Array(rate).fill(16_384));
  buffer.duck(true);
  buffer.pull(out);
  assert.ok(Math.max(...out) < 0.09); // lowered before it began: not for a moment louder
  buffer.flush();
  buffer.duck(false);
  buffer.pull(out);
  assert.ok(Math.max(...out) < 0.09); // what fades out does not get louder
  buffer.push(2, new Int16Array(rate).fill(16_384));
  buffer.pull(out);
  assert.ok(out.subarray(buffer.fade).every((sample) => sample === 0.5));
});

test("an answer that is not held to its end is cancelled and told", async () => {
  const turn = await client.write("a story");
  socket.hear({ type: "response_started", request_id: "r1", trigger: "end_of_input" });
  socket.sent = [];
  client.speaker.dispatchEvent(new CustomEvent("overflow", { detail: { id: turn.number } }));
  assert.deepEqual(socket.sent.map((frame) => JSON.parse(frame)), [{ type: "cancel", request_id: "r1" }]);
  assert.deepEqual(errors, [["too_much_sound", undefined]]);
});
