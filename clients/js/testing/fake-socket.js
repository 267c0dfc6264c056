/* A WebSocket for tests: what is sent is kept, and the server's frames are given to it. */

export class FakeSocket {
  sent = [];
  send(frame) {
    this.sent.push(frame);
  }
  close() {}
  /* The server sends a frame: an object, or bytes. */
  hear(frame) {
    this.onmessage({ data: frame instanceof ArrayBuffer || ArrayBuffer.isView(frame) ? frame : JSON.stringify(frame) });
  }
}
