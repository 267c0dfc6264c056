/* The wire: binary frames (12 bytes of header, then the bare payload) and the JSON frames of the server. Nothing here
   touches the page, so that the golden vectors of protocol/vectors can be run against it anywhere. */

export const HEADER_BYTES = 12;
export const VERSION = 1;
export const MAX_SEQUENCE_ID = 0xffffffff;

const INPUT_CHUNK = 1;
const OUTPUT_CHUNK = 2;
/** @type {("" | import("../client.js").Modality)[]} */
export const MODALITIES = ["", "text", "audio", "video", "image"];
const FLAG_END = 1;
const FLAG_TIMESTAMP = 2;
/* A function takes no more at once everywhere. */
const ARGUMENTS = 8192;

/* A frame that is not one; `code` is the protocol's name for it. */
export class FrameError extends Error {
  /** @param {string} message */
  constructor(message) {
    super(message);
    this.name = "FrameError";
    this.code = "invalid_frame";
  }
}

/* One input chunk as a binary frame, or, where it names its request (`ref`) or is the result of the tool call `toolCallId`, as
   JSON, since only that can say so. `payload` is a Uint8Array; `timestampMs` null means that there is none. */
/** @param {import("../client.js").NumberedChunk} chunk */
export function encodeInput(chunk) {
  const { sequenceId, modality, payload, endOfInput = false, timestampMs = null, toolCallId = null, ref = null } = chunk;
  if (toolCallId !== null || ref !== null) {
    const isText = modality === "text" && (payload.byteLength > 0 || toolCallId !== null);
    return JSON.stringify({
      type: "input_chunk",
      sequence_id: sequenceId,
      modality,
      ...(isText ? { text: new TextDecoder("utf-8", { ignoreBOM: true }).decode(payload) } : {}),
      ...(!isText && payload.byteLength ? { payload: base64Of(payload) } : {}),
      ...(toolCallId === null ? {} : { role: "tool", tool_call_id: toolCallId }),
      ...(timestampMs === null ? {} : { timestamp_ms: timestampMs }),
      end_of_input: endOfInput,
      ref: ref ?? undefined,
    });
  }
  const kind = MODALITIES.indexOf(modality);
  if (kind < 1) throw new FrameError(`no such modality: ${modality}`);
  if (!Number.isInteger(sequenceId) || sequenceId < 0 || sequenceId > MAX_SEQUENCE_ID) {
    throw new FrameError(`no such number: ${sequenceId}`);
  }
  const frame = new Uint8Array(HEADER_BYTES + payload.byteLength);
  const header = new DataView(frame.buffer);
  header.setUint8(0, VERSION);
  header.setUint8(1, INPUT_CHUNK);
  header.setUint8(2, kind);
  header.setUint8(3, (endOfInput ? FLAG_END : 0) | (timestampMs === null ? 0 : FLAG_TIMESTAMP));
  header.setUint32(4, sequenceId);
  header.setUint32(8, timestampMs ?? 0);
  frame.set(payload, HEADER_BYTES);
  return frame;
}

/* One binary frame of the server: { sequenceId, modality, startMs, payload }; the payload is a view, not a copy. */
/** @param {ArrayBuffer} buffer */
export function decodeOutput(buffer) {
  if (buffer.byteLength < HEADER_BYTES) throw new FrameError("a binary frame is shorter than its header");
  const header = new DataView(buffer);
  if (header.getUint8(0) !== VERSION) throw new FrameError(`version ${header.getUint8(0)} is not known`);
  if (header.getUint8(1) !== OUTPUT_CHUNK) throw new FrameError(`a server sends no frames of kind ${header.getUint8(1)}`);
  const modality = MODALITIES[header.getUint8(2)];
  if (!modality) throw new FrameError(`modality ${header.getUint8(2)} is not known`);
  const flags = header.getUint8(3);
  if (flags & ~(FLAG_END | FLAG_TIMESTAMP)) throw new FrameError("a reserved flag is set");
  return {
    sequenceId: header.getUint32(4),
    modality,
    startMs: flags & FLAG_TIMESTAMP ? header.getUint32(8) : null,
    payload: new Uint8Array(buffer, HEADER_BYTES),
  };
}

/* One text frame of the server: an object that has a type. */
/** @param {string} text @returns {import("../client.js").Frame} */
export function parseFrame(text) {
  let frame;
  try {
    frame = JSON.parse(text);
  } catch {
    throw new FrameError("a text frame is not JSON");
  }
  if (frame === null || typeof frame !== "object" || typeof frame.type !== "string") {
    throw new FrameError("a frame is an object with a type");
  }
  return frame;
}

/* The samples of a pcm16 payload, little-endian on every machine; half a sample at its end is left out. */
/** @param {Uint8Array} payload */
export function samplesOf(payload) {
  const count = payload.byteLength >> 1;
  const view = new DataView(payload.buffer, payload.byteOffset, count * 2);
  const samples = new Int16Array(count);
  for (let index = 0; index < count; index++) samples[index] = view.getInt16(index * 2, true);
  return samples;
}

/* The bytes of samples, little-endian on every machine. */
/** @param {Int16Array} samples */
export function bytesOf(samples) {
  const bytes = new Uint8Array(samples.length * 2);
  const view = new DataView(bytes.buffer);
  for (let index = 0; index < samples.length; index++) view.setInt16(index * 2, samples[index], true);
  return bytes;
}

/* A payload for a JSON frame. */
/** @param {Uint8Array} bytes */
function base64Of(bytes) {
  let binary = "";
  for (let start = 0; start < bytes.length; start += ARGUMENTS) {
    binary += String.fromCharCode(...bytes.subarray(start, start + ARGUMENTS));
  }
  return btoa(binary);
}

/* The bytes of a payload in a JSON frame. */
/** @param {string} text */
export function bytesOfBase64(text) {
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let index = 0; index < binary.length; index++) bytes[index] = binary.charCodeAt(index);
  return bytes;
}
