/* What was sent and may have to be sent again: numbers the chunks of a session and keeps those that the server has not
   taken. Chunks of a turn that the page itself began are kept until its answer begins, so that a server that was
   restarted and knows nothing any more can be asked again. */

import { encodeInput } from "./frames.js";

/* What is kept at most, in bytes: some minutes of speech. */
export const MAX_KEPT_BYTES = 24 * 1024 * 1024;

export class Outgoing {
  #next = 0;
  #acknowledged = 0;
  /** @type {(import("../client.js").NumberedChunk & { turn: number | null })[]} */
  #kept = [];
  #keptBytes = 0;
  /** @type {Set<number | null>} */
  #begun = new Set();
  /** @type {Set<number | null>} */
  #answered = new Set();

  constructor(maxBytes = MAX_KEPT_BYTES) {
    this.maxBytes = maxBytes;
  }

  get keptBytes() {
    return this.#keptBytes;
  }

  /* Chunks that the server has not acknowledged. */
  get unacknowledged() {
    return this.#next - this.#acknowledged;
  }

  /* Whether another chunk of this many bytes may be added. */
  /** @param {number} bytes */
  hasRoom(bytes) {
    return this.#keptBytes + bytes <= this.maxBytes;
  }

  /* The frame of a new chunk. `turn` is the number of the page's own turn, or null for an open microphone. */
  /** @param {import("../client.js").InputChunk} chunk */
  add({ modality, payload, endOfInput = false, turn = null, toolCallId = null }) {
    const chunk = { sequenceId: this.#next++, modality, payload, endOfInput, turn, toolCallId };
    this.#kept.push(chunk);
    this.#begun.add(turn);
    this.#keptBytes += payload.byteLength;
    return encodeInput(chunk);
  }

  /** @param {number | null} turn */
  hasBegun(turn) {
    return this.#begun.has(turn);
  }

  /* The server has everything below `next`. */
  /** @param {number} next */
  acknowledge(next) {
    this.#acknowledged = Math.max(this.#acknowledged, next);
    this.#drop();
  }

  /* The answer to a turn began, or nobody wants one any more. */
  /** @param {number | null} turn */
  answered(turn) {
    this.#answered.add(turn);
    this.#drop();
  }

  /* The session goes on where the server has `next`: the frames that it lacks. */
  /** @param {number} next */
  resume(next) {
    this.acknowledge(next);
    return this.#kept.filter((chunk) => chunk.sequenceId >= next).map(encodeInput);
  }

  /* A new session that knows nothing: the frames of every turn that was not answered, under new numbers, and how many
     turns those are. What an open microphone said is gone, and so are the results of calls that it did not make. */
  restart() {
    /** @type {Set<number>} */
    const turns = new Set();
    this.#kept = this.#kept.filter(({ turn, toolCallId }) => {
      if (turn === null || toolCallId !== null || this.#answered.has(turn)) return false;
      turns.add(turn);
      return true;
    });
    this.#kept.forEach((chunk, place) => (chunk.sequenceId = place));
    this.#next = this.#kept.length;
    this.#acknowledged = 0;
    this.#keptBytes = this.#kept.reduce((sum, chunk) => sum + chunk.payload.byteLength, 0);
    return { frames: this.#kept.map(encodeInput), turns };
  }

  #drop() {
    this.#kept = this.#kept.filter((chunk) => {
      const { sequenceId, turn } = chunk;
      if (sequenceId >= this.#acknowledged || (turn !== null && !this.#answered.has(turn))) return true;
      this.#keptBytes -= chunk.payload.byteLength;
      return false;
    });
  }
}
