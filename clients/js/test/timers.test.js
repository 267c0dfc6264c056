/* The clocks of a session: when a silent connection is given up, and that nothing goes on behind its end. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { Session } from "../client.js";

const CREATED = { type: "session_created", session_id: "s", capabilities: {} };

function opened() {
  let socket;
  class Socket {
    pings = 0;
    constructor() {
      socket = this;
    }
    send(frame) {
      if (JSON.parse(frame).type === "ping") this.pings += 1;
    }
    close() {}
    hear(frame) {
      this.onmessage({ data: JSON.stringify(frame) });
    }
  }
  const session = new Session("http://server.example/", () => "", { WebSocket: Socket });
  session.open();
  socket.hear(CREATED);
  return { session, socket };
}

test("a closed session has no timer, so that Node can end", () => {
  const timers = () => process.getActiveResourcesInfo().filter((name) => name === "Timeout").length;
  const before = timers();
  const { session } = opened();
  assert.ok(timers() > before);
  session.close();
  assert.equal(timers(), before);
});

test("a connection is given up 8 s after the first ping that was not answered", (context) => {
  context.mock.timers.enable({ apis: ["setTimeout", "setInterval"] });
  const { session, socket } = opened();
  context.mock.timers.tick(7900);
  assert.equal(socket.pings, 2); // at once, and after 4 s
  socket.hear({ type: "pong" });
  context.mock.timers.tick(100); // the next ping
  context.mock.timers.tick(7900);
  assert.equal(session.ready, true);
  context.mock.timers.tick(100);
  assert.equal(session.ready, false);
  session.close();
});
