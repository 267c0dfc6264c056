/* What a VoiceChat is given. What it shows is tested in a browser (tests/browser/test_browser_widget.py). */

import assert from "node:assert/strict";
import { test } from "node:test";

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
