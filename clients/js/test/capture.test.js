/* The microphone's side of the audio thread: how long pieces are, and that none is lost. */

import assert from "node:assert/strict";
import { test } from "node:test";

const QUANTUM = 128;
const PIECE = 960;
let Capture;
Object.assign(globalThis, {
  sampleRate: 48_000,
  AudioWorkletProcessor: class {
    posted = [];
    port = { postMessage: (piece) => this.posted.push(piece) };
  },
  registerProcessor: (_name, found) => (Capture = found),
});
await import("../client/capture-worklet.js");

/* So many pieces of sound at a level, as quanta. */
function hear(capture, level, pieces = 1) {
  for (let left = pieces * PIECE; left > 0; left -= QUANTUM) capture.process([[new Float32Array(Math.min(QUANTUM, left)).fill(level)]]);
}
const lengths = (capture) => capture.posted.splice(0).map(({ samples }) => samples.length / PIECE);
const ones = (count) => new Array(count).fill(1);

test("after four seconds of silence pieces wait for one another, and go with the first that is none", () => {
  const capture = new Capture();
  hear(capture, 0.5);
  hear(capture, 0.003, 200);
  assert.deepEqual(lengths(capture), ones(201));
  hear(capture, 0.003, 12);
  assert.deepEqual(lengths(capture), [5, 5]);
  hear(capture, 0.5);
  const [{ samples, peak }] = capture.posted;
  assert.equal(peak, 0.5);
  assert.deepEqual([...new Set(samples.subarray(0, 2 * PIECE))], [Math.round(0.003 * 32767)]);
  assert.deepEqual([...new Set(samples.subarray(2 * PIECE))], [Math.round(0.5 * 32767)]);
  assert.deepEqual(lengths(capture), [3]);
  hear(capture, 0.003, 200); // a turn may still be ending
  assert.deepEqual(lengths(capture), ones(200));
  hear(capture, 0, 4);
  assert.deepEqual(lengths(capture), []);
  hear(capture, 0.004);
  assert.deepEqual(lengths(capture), [5]);
});

test("channels are mixed, and what is too loud is cut", () => {
  const capture = new Capture();
  const [left, right] = [new Float32Array(PIECE).fill(1.5), new Float32Array(PIECE).fill(1)];
  left.fill(0.5, 1);
  right.fill(-1, 1);
  capture.process([[left, right]]);
  const [{ samples }] = capture.posted;
  assert.deepEqual([samples[0], samples[1]], [32767, Math.round(-0.25 * 32767)]);
});
