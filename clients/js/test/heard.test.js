/* Whom the reports of what was heard are about: the answer that plays, also where others have arrived behind it. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { Session, VoiceClient } from "../client.js";
import { FakeSocket } from "../testing/fake-socket.js";

const URL = "http://server.example/";

function conversation() {
  let socket;
  class Socket extends FakeSocket {
    constructor() {
      super();
      socket = this;
    }
  }
  class FakeSpeaker extends EventTarget {
    playing = true;
    playedMs = 1500;
    ids = [];
    play(id) {
      if (!this.ids.includes(id)) this.ids.push(id);
    }
    get playingId() {
      return this.ids[0];
    }
    end() {}
    flush() {}
    attach() {}
  }
  const speaker = new FakeSpeaker();
  const session = new Session(URL, () => "", { WebSocket: Socket });
  const client = new VoiceClient({ url: URL, WebSocket: Socket, connect: () => ({ speaker, session }) });
  client.open();
  socket.onopen();
  socket.hear({ type: "session_created", session_id: "s", capabilities: { tools: true } });
  return { client, socket, speaker };
}

function answer(socket, requestId, number, { begun = true } = {}) {
  const payload = Buffer.alloc(48000).toString("base64");
  if (begun) socket.hear({ type: "response_started", request_id: requestId });
  socket.hear({ type: "output_chunk", sequence_id: number, request_id: requestId, modality: "text", text: "words" });
  socket.hear({ type: "output_chunk", sequence_id: number + 1, request_id: requestId, modality: "audio", payload, start_ms: 0 });
  socket.hear({ type: "output_chunk", sequence_id: number + 2, request_id: requestId, final: true, finish_reason: "stop" });
}

const reports = (socket) => socket.sent.map((frame) => JSON.parse(frame)).filter(({ type }) => type === "output_ack");

test("a report names the answer that plays, not the one that arrived last", (context) => {
  context.mock.timers.enable({ apis: ["setTimeout", "setInterval"] });
  const { client, socket } = conversation();
  answer(socket, "A", 0);
  answer(socket, "B", 3);
  socket.sent = [];
  context.mock.timers.tick(300);
  assert.deepEqual(reports(socket), [{ type: "output_ack", sequence_id: 5, played_ms: 1500, request_id: "A" }]);
  client.close();
});

test("what ended or was flushed is reported by its name", () => {
  const { client, socket, speaker } = conversation();
  answer(socket, "A", 0);
  answer(socket, "B", 3);
  socket.sent = [];
  const [first, second] = speaker.ids;
  speaker.dispatchEvent(new CustomEvent("ended", { detail: { id: first, playedMs: 2000 } }));
  speaker.dispatchEvent(new CustomEvent("flushed", { detail: { id: second, playedMs: 100 } }));
  const told = reports(socket).map(({ request_id, played_ms }) => [request_id, played_ms]);
  assert.deepEqual(told, [["A", 2000], ["B", 100]]);
  client.close();
});
