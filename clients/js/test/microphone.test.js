/* The microphone and its button, in a browser that takes its time to ask the person. */

import assert from "node:assert/strict";
import { beforeEach, test } from "node:test";

import { Microphone, Talk } from "../client.js";

let grants = []; // one function for each question of the browser
let open = new Set(); // tracks that were opened and not stopped
let ports = [];

globalThis.AudioWorkletNode = class {
  port = { postMessage() {} };
  constructor() {
    ports.push(this.port);
  }
  connect() {}
  disconnect() {}
};
globalThis.MediaStreamAudioSourceNode = class {
  connect() {}
  disconnect() {}
};
const getUserMedia = () =>
  new Promise((grant, refuse) => {
    grants.push({
      refuse,
      grant: (name) => {
        const track = { stop: () => open.delete(name) };
        open.add(name);
        grant({ getAudioTracks: () => [track], getTracks: () => [track] });
      },
    });
  });
Object.defineProperty(globalThis, "navigator", { value: { mediaDevices: { getUserMedia } }, configurable: true });

/* Until all promises that are settled have been followed. */
const settled = () => new Promise((resolve) => setImmediate(resolve));

beforeEach(() => {
  grants = [];
  open = new Set();
  ports = [];
});

function button(mode) {
  const sent = [];
  const problems = [];
  let turns = 0;
  const microphone = new Microphone();
  const sound = { wake: async () => ({}), running: async () => {}, rate: 48_000 };
  const session = { sendChunk: (chunk) => sent.push(chunk) > 0, hasBegun: () => true, bufferedBytes: 0 };
  const conversation = { begin: () => ({ number: turns++ }), endSpeech() {}, keepSound() {} };
  const talk = new Talk({ sound, microphone, session, conversation });
  talk.mode = mode;
  talk.addEventListener("problem", ({ detail }) => problems.push(detail.error.message));
  const hear = () => {
    for (const { onmessage } of ports) onmessage?.({ data: { samples: new Int16Array(960), peak: 0.5 } });
  };
  return { talk, microphone, sent, problems, hear, turns: () => turns };
}

/* Pressed, let go and pressed again while the browser asks. */
async function pressTwice({ talk }) {
  talk.press(0);
  await settled();
  talk.mode === "open" ? talk.press(1000) : talk.release(1000);
  talk.press(2000);
  await settled();
  assert.equal(grants.length, 2);
}

for (const mode of ["hold", "open"]) {
  for (const order of [["first", "second"], ["second", "first"]]) {
    test(`two questions open one microphone: ${mode}, the ${order[0]} is answered first`, async () => {
      const hands = button(mode);
      await pressTwice(hands);
      for (const name of order) {
        grants[name === "first" ? 0 : 1].grant(name);
        await settled();
      }
      assert.equal(hands.talk.phase, mode === "open" ? "listening" : "talking");
      assert.deepEqual([...open], ["second"]);
      hands.hear();
      assert.equal(hands.sent.length, 1);
      assert.equal(hands.turns(), mode === "open" ? 0 : 1);
      hands.talk.stop();
      assert.deepEqual([...open], []);
    });
  }
}

test("a refusal of the earlier question does not end what was begun since", async () => {
  const hands = button("hold");
  await pressTwice(hands);
  grants[0].refuse(new Error("dismissed"));
  await settled();
  grants[1].grant("second");
  await settled();
  assert.equal(hands.talk.phase, "talking");
  assert.deepEqual(hands.problems, []);
});

test("what is closed while the browser asks stays closed", async () => {
  const { talk, microphone } = button("hold");
  talk.press(0);
  await settled();
  talk.stop();
  grants[0].grant("late");
  await settled();
  assert.deepEqual([talk.phase, microphone.isOpen, [...open]], ["off", false, []]);
});

test("a finger that the question took off leaves the microphone open for the next press", async () => {
  const { talk, microphone } = button("hold");
  talk.press(0);
  await settled();
  talk.release(1000);
  grants[0].grant("first");
  await settled();
  assert.deepEqual([talk.phase, microphone.isOpen, [...open]], ["off", true, ["first"]]);
});

test("while no more can be kept the network is said to be paused once, and well when there is room again", async () => {
  const { talk, sent, hear } = button("open");
  talk.press(0);
  await settled();
  grants[0].grant("one");
  await settled();
  const told = [];
  talk.addEventListener("network", ({ detail: { state } }) => told.push(state));
  const { sendChunk } = talk.session;
  talk.session.sendChunk = () => false;
  for (let piece = 0; piece < 4; piece++) hear();
  assert.deepEqual(told, ["paused"]);
  talk.session.sendChunk = sendChunk;
  for (let piece = 0; piece < 2; piece++) hear();
  assert.deepEqual(told, ["paused", "well"]);
  assert.equal(sent.length, 2);
});

test("who was muted when the microphone went away is heard when it is opened again", async () => {
  const { talk, microphone, problems } = button("open");
  talk.press(0);
  await settled();
  grants[0].grant("first");
  await settled();
  talk.mute(true);
  microphone.track.onended();
  assert.deepEqual([talk.phase, talk.muted, problems.length], ["off", false, 1]);
  talk.press(1000);
  await settled();
  grants[1].grant("second");
  await settled();
  assert.deepEqual([talk.phase, talk.muted, microphone.track.enabled], ["listening", false, true]);
});
