// RFC 6455 by Node's ws: websocket_ws.mjs URL LIMIT, where LIMIT is the most bytes of a message.
import assert from 'node:assert/strict';
import { once } from 'node:events';
import WebSocket from 'ws';

const [url, limit] = [process.argv[2], Number(process.argv[3])];
const chunk = JSON.stringify({ type: 'input_chunk', sequence_id: 0, text: 'hellö', end_of_input: true });
let passed = 0;

async function opened(protocols = [], options = {}) {
  const socket = new WebSocket(url, protocols, options);
  await once(socket, 'open');
  return socket;
}

function answer(socket) {
  return new Promise((resolve, reject) => {
    let text = '';
    socket.on('message', (data) => {
      const frame = JSON.parse(data);
      if (frame.type === 'error') reject(new Error(frame.message));
      text += frame.text ?? '';
      if (frame.final) resolve(text);
    });
    socket.on('close', (code) => reject(new Error(`closed with ${code}`)));
  });
}

async function closeCode(socket) {
  socket.on('error', () => {});
  return (await once(socket, 'close'))[0];
}

// With an offer of compression, which is off; in one frame, in fragments, and with empty ones.
for (const pieces of [[chunk], [...chunk], ['', chunk, '']]) {
  const socket = await opened('omni.v1+json', { perMessageDeflate: true });
  assert.equal(socket.extensions, '');
  assert.equal(socket.protocol, 'omni.v1+json');
  const said = answer(socket);
  pieces.forEach((piece, at) => socket.send(piece, { fin: at === pieces.length - 1 }));
  assert.equal(await said, 'hellö');
  socket.close();
  assert.equal(await closeCode(socket), 1005);
  passed += 1;
}
for (const payload of ['', 'x'.repeat(125)]) {
  const socket = await opened();
  socket.ping(payload);
  const [data] = await once(socket, 'pong');
  assert.equal(data.toString(), payload);
  socket.pong('nobody asked');
  const said = answer(socket);
  socket.send(chunk);
  assert.equal(await said, 'hellö');
  socket.close(4999, 'ü'.repeat(61));
  assert.equal(await closeCode(socket), 4999);
  passed += 1;
}
for (const [send, code] of [
  [(socket) => socket.send(chunk, { mask: false }), 1002],
  [(socket) => socket.send(Buffer.from([0xc3, 0x28]), { binary: false }), 1007],
  [(socket) => socket.send(Buffer.alloc(limit + 1)), 1009],
]) {
  const socket = await opened();
  send(socket);
  assert.equal(await closeCode(socket), code);
  passed += 1;
}
{
  const socket = new WebSocket(url, [], { origin: 'http://elsewhere.example' });
  const [, response] = await once(socket, 'unexpected-response');
  assert.equal(response.statusCode, 403);
  response.destroy();
  passed += 1;
}
console.log(`${passed} passed`);
