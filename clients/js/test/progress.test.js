/* A client gets on or says so: what is sent when, when it is given up, and how soon a lost connection is made again. */

import assert from "node:assert/strict";
import { afterEach, beforeEach, mock, test } from "node:test";

import { Conversation, Outgoing, Session, VoiceClient } from "../client.js";
import { MAX_KEPT_BYTES } from "../client/outgoing.js";
import { cut, PIECE_BYTES, Uplink, WINDOW_BYTES } from "../client/uplink.js";
import { FakeSocket } from "../testing/fake-socket.js";

let sockets = [];
class Socket extends FakeSocket {
  constructor(url) {
    super();
    this.resumes = new URL(url).searchParams.get("session_id");
    sockets.push(this);
  }
  get chunks() {
    return this.sent.filter((frame) => typeof frame !== "string");
  }
  types() {
    return this.sent.map((frame) => (typeof frame === "string" ? JSON.parse(frame).type : "chunk"));
  }
}
const last = () => sockets.at(-1);
const CREATED = { type: "session_created", session_id: "s", resume_token: "t", capabilities: {}, limits: { max_chunk_bytes: 4 << 20 } };
const created = (more) => last().hear({ ...CREATED, ...more });
const refused = (code, more = {}) => ({ type: "error", error: { code, message: "no", ...more } });
const audio = (bytes, turn = 0, more = {}) => ({ modality: "audio", payload: new Uint8Array(bytes), turn, ...more });

/* What follows a close at once, in promises; time stands still meanwhile. */
const settled = () => new Promise((resolve) => setImmediate(resolve));

let running = [];
beforeEach(() => {
  sockets = [];
  mock.timers.enable({ apis: ["setTimeout", "setInterval"] });
  mock.method(Math, "random", () => 0.5); // a delay as it is listed
  mock.method(globalThis, "fetch", () => Promise.reject(new TypeError()));
});
afterEach(() => {
  for (const one of running.splice(0)) one.close();
  mock.timers.reset();
  mock.restoreAll();
});

function opened(more = {}) {
  const session = new Session("http://server.example/", () => "", { WebSocket: Socket });
  running.push(session);
  const told = { waits: [], undelivered: [], states: [] };
  session.addEventListener("state", ({ detail }) => {
    told.states.push(detail.state);
    if (detail.state === "waiting") told.waits.push([detail.seconds, detail.notice?.error?.code ?? null]);
  });
  session.addEventListener("undelivered", ({ detail }) => told.undelivered.push([detail.turn, detail.code]));
  session.open();
  created(more);
  return { session, told };
}

/* The connection ends, and the next one is there. */
async function again(code, ...frames) {
  for (const frame of frames) last().hear(frame);
  last().onclose({ code });
  await settled();
  mock.timers.tick(10_000);
}

// --- why a connection ended, and when the next one is made

for (const [name, code, frames, wait] of [
  ["the error of a request does not decide over a lost connection", 1006, [refused("engine_overloaded", { retry_after_ms: 3_600_000, request_id: "r" })], [0.05, null]],
  ["nor does one behind which something else was said", 1013, [refused("engine_overloaded", { retry_after_ms: 9000 }), { type: "pong" }], [0.05, null]],
  ["one that ends the connection does", 1013, [refused("engine_overloaded", { retry_after_ms: 9000 })], [9, "engine_overloaded"]],
]) {
  test(name, async () => {
    const { told } = opened();
    await again(code, ...frames);
    assert.deepEqual(told.waits, [wait]);
  });
}

test("an error before the session explains also a close without a code", async () => {
  const { told } = opened();
  await again(1006);
  await again(1006, refused("engine_overloaded", { retry_after_ms: 9000 }));
  assert.deepEqual(told.waits[1], [9, "engine_overloaded"]);
});

test("delays grow while a server opens and closes, and not beyond the last", async () => {
  const { told } = opened();
  for (let number = 0; number < 7; number++) {
    await again(1006);
    last().onopen();
    created();
  }
  assert.deepEqual(told.waits.map(([seconds]) => seconds), [0.05, 0.1, 0.2, 0.4, 0.8, 1, 1]);
});

test("delays grow while a server takes the connection and refuses the session", async () => {
  const { told } = opened();
  for (let number = 0; number < 5; number++) {
    await again(1013, refused("engine_overloaded"));
    last().onopen();
  }
  assert.deepEqual(told.waits.map(([seconds]) => seconds), [0.25, 0.5, 1, 1, 1]);
});

test("only what was never taken in before begins the delays anew", async () => {
  const { session, told } = opened();
  const taken = (next) => last().hear({ type: "input_ack", next_sequence_id: next });
  const seconds = () => told.waits.at(-1)[0];
  session.sendChunk(audio(10));
  await again(1006);
  created();
  taken(1);
  await again(1006);
  assert.equal(seconds(), 0.05);
  created(); // a new session: the same chunk is taken once more
  taken(1);
  await again(1006);
  assert.equal(seconds(), 0.1);
  created();
  session.sendChunk(audio(10));
  taken(2);
  await again(1006);
  assert.equal(seconds(), 0.05);
});

test("what a resumed session has taken in meanwhile counts, too", async () => {
  const { session, told } = opened();
  await again(1006);
  created();
  session.sendChunk(audio(10));
  await again(1006);
  last().hear({ type: "session_resumed", session_id: "s", resume_token: "u", next_sequence_id: 1 });
  await again(1006);
  assert.deepEqual(told.waits.map(([seconds]) => seconds), [0.05, 0.1, 0.05]);
});

test("a session may be at another replica for half a minute, and then tries are rarer", async () => {
  const { told } = opened();
  for (let number = 0; number < 37; number++) await again(1006);
  const seconds = told.waits.map(([wait]) => wait);
  assert.deepEqual(seconds.slice(0, 7), [0.05, 0.1, 0.2, 0.4, 0.8, 1, 1]);
  assert.deepEqual(seconds.slice(33), [1, 1, 4, 4]);
  assert.ok(sockets.slice(1).every(({ resumes }) => resumes === "s"));
});

test("whether the key is refused is asked once the session has not been found for a while", async () => {
  const { told } = opened();
  const asked = mock.method(globalThis, "fetch", async () => ({ status: 401 }));
  for (let number = 0; number < 5; number++) await again(1006);
  assert.equal(asked.mock.callCount(), 0);
  await again(1006);
  assert.equal(told.states.at(-1), "refused");
});

test("a session that is handed over is resumed at once, as often as that happens, and nothing of it is given up", async () => {
  const { session, told } = opened();
  session.sendChunk(audio(10));
  for (let number = 0; number < 5; number++) {
    last().hear({ type: "session_closing", reason: "shutting_down", retryable: true, time_left_ms: 0, resume: "now" });
    last().onclose({ code: 1012 });
    await settled();
    mock.timers.tick(0);
    assert.equal(last().resumes, "s");
    last().hear({ type: "session_resumed", session_id: "s", resume_token: "u", next_sequence_id: 0 });
    assert.equal(last().chunks.length, 1);
  }
  assert.deepEqual(told.waits, Array(5).fill([0, null]));
  assert.deepEqual(told.undelivered, []);
});

test("a server that has less than was acknowledged is left for a new session, which is asked the turn again", async () => {
  const { session } = opened();
  session.sendChunk(audio(10, 0, { endOfInput: true }));
  last().hear({ type: "input_ack", next_sequence_id: 1 });
  await again(1006);
  last().hear({ type: "session_resumed", session_id: "s", resume_token: "u", next_sequence_id: 0 });
  await settled();
  mock.timers.tick(10_000);
  assert.equal(last().resumes, null);
  created();
  assert.equal(last().chunks.length, 1);
});

test("a session that failed is not resumed, one whose connection broke is", async () => {
  const addresses = [];
  const { session } = opened();
  session.WebSocket = class extends Socket {
    constructor(url) {
      super(url);
      addresses.push(url.searchParams.has("resume_token"));
    }
  };
  await again(1006);
  created();
  await again(1011, refused("engine_failed"));
  assert.deepEqual(addresses, [true, false]);
});

test("a server that says nothing is given up: 15 s from the first packet, 8 s from the handshake", async () => {
  const session = new Session("http://server.example/", () => "", { WebSocket: Socket });
  running.push(session);
  session.open();
  mock.timers.tick(14_999);
  assert.equal(session.state, "connecting");
  mock.timers.tick(1);
  await settled();
  assert.equal(session.state, "waiting");
  mock.timers.tick(300);
  last().onopen();
  mock.timers.tick(7999);
  assert.equal(session.state, "connecting");
  mock.timers.tick(1);
  await settled();
  assert.equal(session.state, "waiting");
});

test("a handshake of a return is given up sooner, as another server may answer the next, and each further one later", async () => {
  const { session } = opened();
  await again(1006);
  for (const milliseconds of [4000, 8000, 15_000, 15_000]) {
    assert.equal(last().resumes, "s");
    mock.timers.tick(milliseconds - 1);
    assert.equal(session.state, "connecting");
    mock.timers.tick(1);
    await settled();
    assert.equal(session.state, "waiting");
    mock.timers.tick(1000);
  }
});

test("a session that was deleted, or is another client's, has ended", async () => {
  for (const [reason, code] of [["deleted", 4404], ["replaced", 4409]]) {
    const { session, told } = opened();
    last().hear({ type: "session_closing", reason, retryable: false, time_left_ms: 0 });
    await again(code);
    assert.deepEqual([session.state, told.waits], ["ended", []]);
  }
});

test("a session that is closed while it asks why it was refused stays closed", async () => {
  const session = new Session("http://server.example/", () => "", { WebSocket: Socket });
  let answer;
  mock.method(globalThis, "fetch", () => new Promise((_resolve, reject) => (answer = reject)));
  session.open();
  last().onclose({ code: 1006 });
  session.close();
  answer(new TypeError());
  await settled();
  mock.timers.tick(60_000);
  assert.deepEqual([session.state, sockets.length], ["ended", 1]);
});

// --- a chunk that ends the session

for (const [name, code, frames] of [
  ["an error that blames the input", 1009, [refused("payload_too_large")]],
  ["a close that blames the frame", 1009, []],
  ["text that is not UTF-8", 1007, []],
]) {
  test(`a turn is given up at once after ${name}, and what else waits goes on`, async () => {
    const { session, told } = opened();
    session.sendChunk(audio(10, 3));
    session.sendChunk(audio(12, 4));
    await again(code, ...frames);
    assert.deepEqual(told.undelivered, [[3, code === 1009 ? "payload_too_large" : "undeliverable"]]);
    created();
    assert.deepEqual(last().chunks.map(({ byteLength }) => byteLength), [24]);
    assert.equal(session.sendChunk(audio(10, 3)), false); // the rest of a turn of which a part is missing
    assert.equal(session.sendChunk(audio(10, 5)), true);
  });
}

test("a turn that is given up leaves its room to others before the next session", () => {
  const outgoing = new Outgoing(100);
  outgoing.add({ modality: "audio", payload: new Uint8Array(50), turn: 1 });
  outgoing.acknowledge(1);
  outgoing.add({ modality: "audio", payload: new Uint8Array(40), turn: 1 });
  outgoing.add({ modality: "audio", payload: new Uint8Array(10), turn: 2 });
  outgoing.giveUp(1);
  assert.deepEqual([outgoing.keptBytes, outgoing.hasRoom(90), outgoing.hasRoom(91)], [10, true, false]);
});

test("a turn at which three connections end is given up, not two", async () => {
  const { session, told } = opened();
  session.sendChunk(audio(10, 3));
  await again(1006);
  created();
  await again(1006);
  created();
  assert.deepEqual([told.undelivered, last().chunks.length], [[], 1]);
  await again(1006);
  assert.deepEqual(told.undelivered, [[3, "undeliverable"]]);
  created();
  assert.deepEqual(last().chunks, []);
});

test("a turn of which each connection brings more is never given up", async () => {
  const { session, told } = opened();
  for (let number = 0; number < 9; number++) session.sendChunk(audio(10, 3));
  for (let number = 1; number < 9; number++) {
    await again(1006);
    last().hear({ type: "session_resumed", session_id: "s", resume_token: "u", next_sequence_id: number });
  }
  assert.deepEqual(told.undelivered, []);
});

test("a turn that was taken and at whose answer the server dies is given up, too", async () => {
  const { session, told } = opened();
  session.sendChunk(audio(10, 3, { endOfInput: true }));
  for (let number = 0; number < 4; number++) {
    last().hear({ type: "input_ack", next_sequence_id: 1 });
    await again(1006);
    created();
  }
  assert.deepEqual(told.undelivered, [[3, "undeliverable"]]);
});

for (const code of ["engine_overloaded", "rate_limited", "shutting_down"]) {
  test(`nothing is given up for ${code}`, async () => {
    const { session, told } = opened();
    session.sendChunk(audio(10, 3));
    for (let number = 0; number < 5; number++) {
      await again(1013, refused(code));
      created();
    }
    assert.deepEqual([told.undelivered, last().chunks.length], [[], 1]);
  });
}

test("an open microphone whose chunk ends the session goes on in a new one, without what it said before", async () => {
  const { session } = opened();
  session.sendChunk(audio(10, null));
  await again(1009, refused("payload_too_large"));
  created();
  session.sendChunk(audio(12, null));
  assert.deepEqual(last().chunks.map(({ byteLength }) => byteLength), [24]);
});

// --- what the server takes at once

test("what is a stream is cut at the limit, what is one thing is not", () => {
  const of = (modality, bytes, more = {}) => cut({ modality, payload: Uint8Array.from({ length: bytes }, (_, index) => index), ...more }, 100);
  const sizes = (pieces) => pieces.map(({ payload, endOfInput = false }) => [payload.byteLength, endOfInput]);
  assert.deepEqual(sizes(of("audio", 100, { endOfInput: true })), [[100, true]]);
  assert.deepEqual(sizes(of("audio", 101, { endOfInput: true })), [[100, false], [1, true]]);
  assert.deepEqual(sizes(of("text", 250)), [[100, false], [100, false], [50, false]]);
  assert.deepEqual(sizes(of("image", 250)), [[250, false]]);
  assert.deepEqual(sizes(of("text", 250, { toolCallId: "c" })), [[250, false]]);
  assert.deepEqual(sizes(of("video", 101)), [[100, false], [1, false]]);
  const whole = of("audio", 250).flatMap(({ payload }) => [...payload]);
  assert.deepEqual(whole, Array.from({ length: 250 }, (_, index) => index));
  for (const head of ["89504e470d0a1a0a", "ffd8ffe0", "474946383961", "424d0000", "52494646000000005745425056503820"]) {
    const payload = new Uint8Array(101);
    payload.set(Buffer.from(head, "hex"));
    assert.equal(cut({ modality: "video", payload }, 100).length, 1, head);
  }
  const odd = cut({ modality: "audio", payload: new Uint8Array(8) }, 3); // samples stay whole
  assert.deepEqual(sizes(odd).map(([size]) => size), [2, 2, 2, 2]);
  assert.equal(cut({ modality: "audio", payload: new Uint8Array(2) }, 1).length, 2);
});

test("a picture is sent at the server's limit and refused beyond it", () => {
  const { session } = opened({ limits: { max_chunk_bytes: 1000 } });
  const picture = (bytes) => session.sendChunk({ modality: "image", payload: new Uint8Array(bytes), turn: 0 });
  assert.deepEqual([picture(1000), picture(1001)], [true, false]);
  assert.equal(last().chunks.length, 1);
});

test("what was kept for an earlier server is cut for the next one, and a picture that it cannot take is told", async () => {
  const { session, told } = opened();
  session.sendChunk(audio(2000, 1, { endOfInput: true }));
  session.sendChunk({ modality: "image", payload: new Uint8Array(1001), turn: 2 });
  session.sendChunk({ modality: "image", payload: new Uint8Array(1000), turn: 3 });
  await again(1006);
  created({ session_id: "other", limits: { max_chunk_bytes: 1000 } });
  assert.deepEqual(last().chunks.map(({ byteLength }) => byteLength - 12), [1000, 1000, 1000]);
  assert.deepEqual(last().chunks.map((frame) => new DataView(frame.buffer).getUint32(4)), [0, 1, 2]);
  assert.deepEqual(last().chunks.map((frame) => frame[3]), [0, 1, 0]);
  assert.deepEqual(told.undelivered, [[2, "payload_too_large"]]);
});

// --- a turn may be long

test("what the server has taken leaves room for the rest of a turn, however long that is", () => {
  const { session } = opened();
  for (let number = 1; number < 40; number++) {
    assert.equal(session.sendChunk(audio(1 << 20)), true, `${number} MiB`);
    last().hear({ type: "input_ack", next_sequence_id: number * 16 });
  }
  assert.equal(session.unacknowledged, 0);
});

test("what it has not taken is bounded", () => {
  const outgoing = new Outgoing();
  for (let number = 0; number < 23; number++) outgoing.add(audio(1 << 20));
  assert.deepEqual([outgoing.hasRoom(1 << 20), outgoing.hasRoom((1 << 20) + 1)], [true, false]);
  outgoing.acknowledge(1);
  assert.deepEqual([outgoing.hasRoom(2 << 20), outgoing.hasRoom((2 << 20) + 1)], [true, false]);
  outgoing.add(audio(2 << 20));
  assert.ok(outgoing.keptBytes <= MAX_KEPT_BYTES);
});

test("of a turn that is not kept whole no new session hears the rest", async () => {
  const { session, told } = opened();
  session.sendChunk(audio(10, 1));
  for (let number = 1; number < 25; number++) {
    session.sendChunk(audio(1 << 20, 2));
    last().hear({ type: "input_ack", next_sequence_id: 1 + number * 16 });
  }
  const resumed = { type: "session_resumed", session_id: "s", resume_token: "u", next_sequence_id: 385 };
  await again(1006);
  last().hear(resumed); // it has all of it
  assert.equal(session.sendChunk(audio(10, 2)), true);
  await again(1006);
  created({ session_id: "other" });
  assert.deepEqual(told.undelivered, [[2, "undeliverable"]]);
  assert.deepEqual(last().chunks.map(({ byteLength }) => byteLength), [22]);
  assert.equal(session.sendChunk(audio(10, 2, { endOfInput: true })), false);
});

// --- an upload is no silence

test("a connection is given the time that what is being sent up needs", () => {
  const { session } = opened();
  last().hear({ type: "pong" });
  session.sendChunk({ modality: "image", payload: new Uint8Array(1_600_000 - 12), turn: 0 }); // 100 s at 16 bytes a millisecond
  mock.timers.tick(4000); // the next ping
  mock.timers.tick(107_999);
  assert.equal(session.ready, true);
  mock.timers.tick(1);
  assert.equal(session.ready, false);
});

test("pieces that are acknowledged keep a slow connection for as long as it takes", () => {
  const { session } = opened();
  session.sendChunk(audio(3 << 20));
  for (let number = 1; number <= 48; number++) {
    mock.timers.tick(7900); // 8 kB a second
    assert.equal(session.ready, true);
    last().hear({ type: "input_ack", next_sequence_id: number });
  }
  assert.deepEqual([session.unacknowledged, last().chunks.length, sockets.length], [0, 48, 1]);
});

test("a window is in flight, and the next byte waits", () => {
  const sent = [];
  const uplink = new Uplink((frame) => sent.push(frame.byteLength ?? frame));
  uplink.open();
  uplink.chunk(new Uint8Array(WINDOW_BYTES - 100));
  uplink.chunk(new Uint8Array(100));
  uplink.chunk(new Uint8Array(1));
  assert.deepEqual([sent.length, uplink.waitingBytes], [2, 1]);
  uplink.acknowledge(1);
  assert.deepEqual([sent.length, uplink.waitingBytes, uplink.largestInFlight], [3, 0, 100]);
  uplink.close();
});

test("a chunk larger than the window goes alone", () => {
  const sent = [];
  const uplink = new Uplink((frame) => sent.push(frame.byteLength));
  uplink.open();
  uplink.chunk(new Uint8Array(10));
  uplink.chunk(new Uint8Array(WINDOW_BYTES + 1));
  assert.deepEqual(sent, [10]);
  uplink.acknowledge(1);
  assert.deepEqual(sent, [10, WINDOW_BYTES + 1]);
  uplink.close();
});

test("input stays within the server's credit, which is asked for where no acknowledgement is due", () => {
  const sent = [];
  const uplink = new Uplink((frame) => sent.push(typeof frame === "string" ? JSON.parse(frame).sequence_id : frame.byteLength));
  uplink.open();
  for (const bytes of [10, 50, 60]) uplink.chunk(new Uint8Array(bytes));
  for (const bytes of [50, 51]) uplink.chunk(new Uint8Array(bytes));
  assert.deepEqual(sent.splice(0), [10, 50, 60, 50, 51]); // nothing was said of credit
  uplink.acknowledge(5, 100);
  for (const bytes of [50, 50, 1]) uplink.chunk(new Uint8Array(bytes));
  assert.deepEqual(sent.splice(0), [50, 50]);
  uplink.acknowledge(7, 0);
  mock.timers.tick(249);
  assert.deepEqual(sent.splice(0), []);
  mock.timers.tick(1);
  assert.deepEqual(sent.splice(0), [6]); // a chunk that the server has
  uplink.acknowledge(7, 1);
  assert.deepEqual(sent.splice(0), [1]);
  uplink.close();
});

test("behind 5 s without credit input is sent all the same", () => {
  const sent = [];
  const uplink = new Uplink((frame) => sent.push(typeof frame === "string" ? "?" : frame.byteLength));
  uplink.open(7);
  uplink.acknowledge(7, 0);
  uplink.chunk(new Uint8Array(10));
  uplink.chunk(new Uint8Array(20));
  for (let number = 0; number < 19; number++) mock.timers.tick(250);
  assert.deepEqual(sent, Array(19).fill("?"));
  mock.timers.tick(250);
  assert.deepEqual(sent.slice(20), [10]);
  uplink.close();
});

test("a cancel and a configuration keep their places between chunks; pings do not wait", () => {
  const { session } = opened();
  last().sent = [];
  session.sendChunk(audio(2 * WINDOW_BYTES, 0));
  session.cancel();
  session.configure({ voice: "x" });
  session.sendChunk(audio(10, 1));
  session.check();
  const window = WINDOW_BYTES / (PIECE_BYTES + 12) | 0;
  assert.deepEqual(last().types(), [...Array(window).fill("chunk"), "ping"]);
  assert.ok(session.bufferedBytes > WINDOW_BYTES);
  for (let number = 1; number <= 32; number++) last().hear({ type: "input_ack", next_sequence_id: number });
  assert.deepEqual(last().types().slice(-4), ["chunk", "cancel", "session_config", "chunk"]);
  assert.equal(last().chunks.length, 33);
});

// --- a page of another origin

for (const [name, replies, code] of [
  ["the server's own word", [() => Response.json({ error: { code: "origin_not_allowed", message: "pages of http://page.example are not allowed" } }, { status: 403 })], "origin_not_allowed"],
  ["a reply that may not be read", [TypeError, () => Response.error()], "origin_not_allowed"],
  ["no reply at all", [TypeError, TypeError], null],
  ["an origin that is allowed", [() => Response.json({ error: { code: "method_not_allowed" } }, { status: 405 })], null],
  ["a proxy's own page", [() => new Response("<html>", { status: 502 })], null],
]) {
  test(`why a page has no session: ${name}`, async () => {
    globalThis.location = { origin: "http://page.example" };
    const asked = [];
    const client = new VoiceClient({ url: "http://server.example/", WebSocket: Socket });
    running.push(client);
    const errors = [];
    client.addEventListener("error", ({ detail }) => errors.push(detail.error));
    mock.method(globalThis, "fetch", async (url, { method = "GET", mode = "cors" }) => {
      if (url.pathname === "/v1/models") throw new TypeError();
      asked.push(`${method} ${mode} ${url.pathname}`);
      const reply = replies[asked.length > replies.length ? asked.length - 1 - replies.length : asked.length - 1];
      if (reply === TypeError) throw new TypeError();
      return reply();
    });
    try {
      const waits = [];
      client.session.addEventListener("state", ({ detail }) => detail.state === "waiting" && waits.push(detail.notice?.error?.code ?? null));
      client.open();
      for (let number = 0; number < 2; number++) {
        last().onclose({ code: 1006 });
        await settled();
        mock.timers.tick(60_000);
      }
      assert.deepEqual(waits, [code, code]);
      assert.deepEqual(asked.slice(0, replies.length), ["POST cors /health", "GET no-cors /health"].slice(0, replies.length));
      assert.deepEqual(errors.map((error) => error.code), code ? [code] : []); // said once
      for (const error of errors) assert.match(error.message, /http:\/\/page\.example/);
    } finally {
      delete globalThis.location;
    }
  });
}

// --- turns

function conversing(more = {}) {
  const client = new VoiceClient({ url: "http://server.example/", WebSocket: Socket, ...more });
  running.push(client);
  const errors = [];
  client.addEventListener("error", ({ detail }) => errors.push(detail.error.code));
  client.open();
  const capabilities = { tools: true, turn_detection: false, input_modalities: ["text"], tasks: ["chat"] };
  created({ capabilities, limits: { max_chunk_bytes: 1000 } });
  return { client, errors };
}

test("a turn that cannot be sent fails, whether it is said or written, and a picture is told", async () => {
  const { client, errors } = conversing();
  const spoken = client.say(new Int16Array(MAX_KEPT_BYTES / 2 + 1));
  assert.match(spoken.answer.error, /Too much waits/);
  assert.equal(client.say(new Int16Array(MAX_KEPT_BYTES / 2)).answer.state, "thinking");
  assert.equal((await client.write("and this?")).answer.state, "failed");
  client.show("image", new Uint8Array(1001));
  client.show("image", new Uint8Array(10));
  assert.deepEqual(errors, ["payload_too_large", "undeliverable"]);
});

test("a turn that is given up fails with its reason", async () => {
  const { client } = conversing();
  const turn = await client.write("hello");
  await again(1009, refused("payload_too_large"));
  assert.deepEqual([turn.answer.state, turn.answer.error], ["failed", "payload_too_large"]);
});

/* A tool that is asked for, and runs until it is let go. */
async function asking() {
  let finish;
  const tools = { weather: { run: () => new Promise((resolve) => (finish = resolve)) } };
  const { client } = conversing({ tools });
  await client.write("Will it rain?");
  const call = { modality: "tool_call", index: 0, id: "call_1", name: "weather", arguments: "{}" };
  last().hear({ type: "response_started", request_id: "r1", trigger: "end_of_input" });
  last().hear({ type: "output_chunk", sequence_id: 0, request_id: "r1", ...call });
  last().hear({ type: "output_chunk", sequence_id: 1, request_id: "r1", final: true, finish_reason: "tool_calls" });
  return { client, finish: (result) => (finish(result), settled()) };
}
const results = () =>
  last().sent.filter((frame) => typeof frame === "string" && frame.includes("tool_call_id")).map((frame) => JSON.parse(frame).text);

test("the result of a tool is of the session that asked, and where that is gone it is said", async () => {
  const { client, finish } = await asking();
  await again(1011, refused("engine_failed"));
  created({ session_id: "other" });
  await finish("rain");
  assert.deepEqual(results(), []);
  const { kind, answer } = client.conversation.turns.at(-1);
  assert.deepEqual([kind, answer.state], ["tool", "failed"]);
});

test("in a conversation that was begun anew nothing is said of a tool of before", async () => {
  const { client, finish } = await asking();
  client.startAnew();
  created({ session_id: "other" });
  await finish("rain");
  assert.deepEqual([results(), client.conversation.turns.filter(({ dropped }) => !dropped)], [[], []]);
});

for (const [bytes, told] of [[1000, /^x{1000}$/], [1001, /^This did not work: the result is too long$/]]) {
  test(`the result of a tool of ${bytes} bytes`, async () => {
    const { finish } = await asking();
    await finish("x".repeat(bytes));
    assert.equal(results().length, 1);
    assert.match(results()[0], told);
  });
}

test("what is known of a session that is lost", () => {
  const conversation = new Conversation();
  conversation.missResults();
  assert.match(conversation.turns[0].answer.error, /connection was lost/);
});

test("a key that is refused when a client comes back closes the microphone", async () => {
  mock.method(globalThis, "fetch", async () => ({ status: 401, json: async () => ({}) }));
  const client = new VoiceClient({ url: "http://server.example/", WebSocket: Socket, mode: "open" });
  running.push(client);
  client.open();
  last().hear({ ...CREATED, resume_token: null, capabilities: { input_modalities: ["audio"] } });
  client.talk.phase = "listening"; // there is no microphone in Node
  await again(1006);
  assert.deepEqual([client.session.state, client.talk.phase], ["connecting", "listening"]); // the network may be back at once
  await again(1006);
  assert.deepEqual([client.session.state, client.talk.phase], ["refused", "off"]);
});
