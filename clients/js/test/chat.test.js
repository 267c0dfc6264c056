/* What a VoiceChat is given. What it shows is tested in a browser (tests/browser/test_browser_widget.py). */

import assert from "node:assert/strict";
import { test } from "node:test";

import { FakeSocket } from "../testing/fake-socket.js";
import { serverOf, VoiceChat } from "../widget/chat.js";

test("a server is named by its address or by that of its WebSocket", () => {
  for (const [given, server] of [
    ["wss://voice.example/v1/streaming_input", "https://voice.example/"],
    ["ws://127.0.0.1:8080/v1/streaming_input?x=1#y", "http://127.0.0.1:8080/"],
    ["https://voice.example", "https://voice.example/"],
    [new URL("wss://voice.example/below/v1/streaming_input/"), "https://voice.example/below/"],
    ["https://voice.example/below", "https://voice.example/below/"],
  ]) {
    assert.equal(serverOf(given), server);
  }
  for (const wrong of ["ftp://voice.example/", "javascript:alert(1)", "voice.example", ""]) {
    assert.throws(() => serverOf(wrong), TypeError);
  }
});

test("a key is refused by its name, and so is what is no client secret", () => {
  const url = "https://voice.example/";
  assert.throws(() => new VoiceChat({ url, key: "sesame" }), /^TypeError: key: A key does not belong into a page/);
  assert.throws(() => new VoiceChat({ url, clientSecret: "sesame" }), /^TypeError: clientSecret: .* begin with ek_/);
  const chat = new VoiceChat({ url, clientSecret: "ek_1" });
  assert.throws(() => chat.configure({ url, key: "sesame" }), TypeError);
});

test("what is shown is the same value until something changes", () => {
  const chat = new VoiceChat({ url: "https://voice.example/" });
  const { shown } = chat;
  assert.equal(chat.shown, shown);
  assert.deepEqual([shown.state, shown.talking, shown.transcript], ["idle", false, []]);
  assert.ok(Object.isFrozen(shown) && Object.isFrozen(shown.transcript));
  chat.mute();
  assert.notEqual(chat.shown, shown);
  assert.deepEqual([shown.muted, chat.shown.muted], [false, true]);
});

test("a conversation whose client secret has expired goes on with another", async (t) => {
  const sockets = [];
  const { WebSocket, fetch } = globalThis;
  globalThis.WebSocket = class extends FakeSocket {
    constructor(url, protocols) {
      super();
      this.key = protocols[1];
      sockets.push(this);
    }
  };
  globalThis.fetch = async () => ({ status: 401 });
  const url = "https://voice.example/";
  const chat = new VoiceChat({ url, clientSecret: "ek_1" });
  t.after(() => {
    chat.close();
    Object.assign(globalThis, { WebSocket, fetch });
  });
  const isRefused = new Promise((resolve) => chat.addEventListener("error", ({ detail }) => resolve(detail.code)));
  await chat.send("Hello");
  sockets[0].hear({ type: "session_created", session_id: "sess_1", capabilities: { input_modalities: [], output_modalities: [] } });
  sockets[0].onclose({ code: 1006 });
  while (sockets.length < 2) await new Promise((resolve) => setTimeout(resolve, 20));
  sockets[1].onclose({ code: 1006 });
  assert.equal(await isRefused, "unauthenticated");
  chat.configure({ url, clientSecret: "ek_1" });
  assert.equal(sockets.length, 2);
  chat.configure({ url, clientSecret: "ek_2" });
  assert.deepEqual([sockets.length, sockets[2].key, chat.shown.error], [3, "omni-api-key.ek_2", null]);
});
