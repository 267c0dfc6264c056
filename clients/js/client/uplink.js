/* Input on its way up: what may be sent now, and what waits until the server has room. Chunks and the frames that have a
   place between them go through here in their order; pings and reports of what was heard do not wait for them.

   A server acknowledges chunk by chunk, so pieces of bounded size are a sign of life every so many bytes, however slow the
   network is; and input beyond the server's credit is not sent, because a server that cannot take it does not read at all. */

/* Sent and not acknowledged, at most. */
export const WINDOW_BYTES = 1024 * 1024;
/* What can be cut is sent in pieces of at most so many bytes. */
export const PIECE_BYTES = 64 * 1024;
const PROBE_MS = 250;
/* Credit is advice: after so long without, input is sent all the same. Refused is better than never sent. */
const PATIENCE_MS = 5000;

/** @import { InputChunk } from "../client.js" */
/** @typedef {string | Uint8Array<ArrayBuffer>} SentFrame */

export class Uplink {
  #send;
  /** @type {{ frame: SentFrame, bytes: number, isChunk: boolean }[]} */
  #waiting = [];
  #waitingBytes = 0;
  /* The bytes of each chunk that was sent, from number #acknowledged on. */
  /** @type {number[]} */
  #inFlight = [];
  #inFlightBytes = 0;
  #acknowledged = 0;
  /* What the server takes beyond the acknowledged; null before it has said. */
  /** @type {number | null} */
  #credit = null;
  #patienceMs = PATIENCE_MS;
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  #timer;

  /* `send` puts a frame on the connection. */
  /** @param {(frame: SentFrame) => void} send */
  constructor(send) {
    this.#send = send;
  }

  get waitingBytes() {
    return this.#waitingBytes;
  }

  /* Of the largest chunk that was sent and not acknowledged: so much has to pass before the server says something. */
  get largestInFlight() {
    return this.#inFlight.reduce((most, bytes) => Math.max(most, bytes), 0);
  }

  /* A connection begins, whose server has everything below `next`. */
  open(next = 0) {
    this.close();
    this.#acknowledged = next;
  }

  /* Forget what waits: the connection is over. */
  close() {
    clearTimeout(this.#timer);
    this.#timer = undefined;
    this.#waiting = [];
    this.#inFlight = [];
    this.#waitingBytes = this.#inFlightBytes = 0;
    this.#credit = null;
    this.#patienceMs = PATIENCE_MS;
  }

  /* The next chunk in its order. */
  /** @param {SentFrame} frame */
  chunk(frame) {
    const bytes = typeof frame === "string" ? frame.length : frame.byteLength;
    this.#waiting.push({ frame, bytes, isChunk: true });
    this.#waitingBytes += bytes;
    this.#pump();
  }

  /* A frame that has its place between chunks. */
  /** @param {SentFrame} frame */
  control(frame) {
    this.#waiting.push({ frame, bytes: 0, isChunk: false });
    this.#pump();
  }

  /* The server has everything below `next`, and takes `credit` bytes more. */
  /** @param {number} next @param {number} [credit] */
  acknowledge(next, credit) {
    while (this.#acknowledged < next && this.#inFlight.length) {
      this.#inFlightBytes -= /** @type {number} */ (this.#inFlight.shift());
      this.#acknowledged += 1;
    }
    this.#credit = credit ?? null;
    this.#pump();
  }

  #pump() {
    while (this.#waiting.length && this.#mayGo(this.#waiting[0])) {
      const { frame, bytes, isChunk } = this.#waiting[0];
      this.#waiting.shift();
      if (isChunk) {
        this.#inFlight.push(bytes);
        this.#inFlightBytes += bytes;
        this.#waitingBytes -= bytes;
        this.#patienceMs = PATIENCE_MS;
      }
      this.#send(frame);
    }
    // An acknowledgement that is due brings credit; without one the server has to be asked.
    if (this.#waiting.length && this.#inFlight.length === 0) this.#timer ??= setTimeout(() => this.#probe(), PROBE_MS);
  }

  /** @param {{ bytes: number, isChunk: boolean }} next */
  #mayGo({ bytes, isChunk }) {
    if (!isChunk) return true;
    const all = this.#inFlightBytes + bytes;
    if (this.#credit !== null && all > this.#credit && (this.#inFlight.length || this.#patienceMs > 0)) return false;
    return this.#inFlight.length === 0 || all <= WINDOW_BYTES;
  }

  /* A chunk that the server has, without its content, is dropped and acknowledged: with the credit of now. */
  #probe() {
    this.#timer = undefined;
    if (!this.#waiting.length || this.#inFlight.length) return;
    this.#patienceMs -= PROBE_MS;
    if (this.#acknowledged > 0) {
      this.#send(JSON.stringify({ type: "input_chunk", sequence_id: this.#acknowledged - 1 }));
    }
    this.#pump();
  }
}

/* A chunk in pieces of at most `most` bytes; the last has its end. One that cannot be cut is a piece. */
/** @template {InputChunk} Chunk @param {Chunk} chunk @param {number} most @returns {Chunk[]} */
export function cut(chunk, most) {
  const { payload, endOfInput = false } = chunk;
  if (payload.byteLength <= most || !canBeCut(chunk)) return [chunk];
  const size = most - (most % 2) || most; // samples stay whole where they can
  const pieces = [];
  for (let start = 0, end = 0; end < payload.byteLength; start = end) {
    end = Math.min(start + size, payload.byteLength);
    // A piece of text that is JSON has to be text.
    if (chunk.modality === "text") while (end > start + 4 && (payload[end] & 0xc0) === 0x80) end--;
    pieces.push({ ...chunk, payload: payload.subarray(start, end), endOfInput: endOfInput && end === payload.byteLength });
  }
  return pieces;
}

/* Sound, text and files of video are streams. A picture is one chunk, and so is the result of a call. */
/** @param {InputChunk} chunk */
function canBeCut({ modality, payload, toolCallId = null }) {
  if (modality === "image" || toolCallId !== null) return false;
  return modality !== "video" || !isPicture(payload);
}

/** @type {number[][]} */
const PICTURES = [[0x89, 0x50, 0x4e, 0x47], [0xff, 0xd8, 0xff], [0x47, 0x49, 0x46, 0x38], [0x42, 0x4d]];
const RIFF = [0x52, 0x49, 0x46, 0x46];
const WEBP = [0x57, 0x45, 0x42, 0x50];

/** @param {Uint8Array} bytes */
function isPicture(bytes) {
  /** @param {number[]} signature @param {number} [place] */
  const has = (signature, place = 0) => signature.every((byte, index) => bytes[place + index] === byte);
  return PICTURES.some((signature) => has(signature)) || (has(RIFF) && has(WEBP, 8));
}
