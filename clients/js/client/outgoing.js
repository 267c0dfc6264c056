/* What was sent and may have to be sent again: numbers the chunks of a session and keeps those that the server has not
   taken. Chunks of a turn that the page itself began are kept until its answer begins, so that a server that was
   restarted and knows nothing any more can be asked again. */

import { encodeInput } from "./frames.js";
import { cut } from "./uplink.js";

/* What is kept at most, in bytes: some minutes of speech. What the server has taken gives way to what it has not, so this
   bounds no turn. */
export const MAX_KEPT_BYTES = 24 * 1024 * 1024;

/** A chunk that is kept; `taken`: the server has acknowledged it once, in this session or an earlier one; `refused` in this one.
 @typedef {Required<import("../client.js").InputChunk> & { sequenceId: number, taken: boolean, refused: boolean }} KeptChunk */

export class Outgoing {
  #next = 0;
  #acknowledged = 0;
  /** @type {KeptChunk[]} */
  #kept = [];
  #keptBytes = 0;
  #unacknowledgedBytes = 0;
  /** @type {Set<number | null>} */
  #begun = new Set();
  /** @type {Set<number | null>} */
  #answered = new Set();
  /* Turns of which not everything is kept: a session that knows nothing cannot be asked them. */
  /** @type {Set<number | null>} */
  #incomplete = new Set();
  /* Turns that no session takes any more of. */
  /** @type {Set<number | null>} */
  #gone = new Set();

  constructor(maxBytes = MAX_KEPT_BYTES) {
    this.maxBytes = maxBytes;
  }

  get keptBytes() {
    return this.#keptBytes;
  }

  get acknowledged() {
    return this.#acknowledged;
  }

  /* Chunks that the server has not acknowledged. */
  get unacknowledged() {
    return this.#next - this.#acknowledged;
  }

  /* Whether another chunk of this many bytes may be added: what the server has is no reason against it. */
  /** @param {number} bytes */
  hasRoom(bytes) {
    return this.#unacknowledgedBytes + bytes <= this.maxBytes;
  }

  /* Whether nothing of this turn may be sent any more: a part of it is lost. */
  /** @param {number | null} turn */
  isGone(turn) {
    return this.#gone.has(turn);
  }

  /* The turn at whose chunk the server has not gone on, or else the first that is not answered; undefined: nothing is kept. */
  get stuckAt() {
    const unacknowledged = this.#kept.find(({ sequenceId }) => sequenceId >= this.#acknowledged);
    return (unacknowledged ?? this.#kept[0])?.turn;
  }

  /* The frame of a new chunk. `turn` is the number of the page's own turn, or null for an open microphone. `ref` names the
     request of a turn, which its first chunk says, and its last, in case that the first is refused. */
  /** @param {import("../client.js").InputChunk} given */
  add({ modality, payload, endOfInput = false, turn = null, toolCallId = null, ref = null }) {
    const says = turn === null || endOfInput || !this.#begun.has(turn);
    const chunk = { sequenceId: this.#next++, modality, payload, endOfInput, turn, toolCallId, ref: says ? ref : null, taken: false, refused: false };
    this.#kept.push(chunk);
    this.#begun.add(turn);
    this.#keptBytes += payload.byteLength;
    this.#unacknowledgedBytes += payload.byteLength;
    this.#makeRoom();
    return encodeInput(chunk);
  }

  /* The turn that the chunk of this number is of; null where it is of none, or is not kept. */
  /** @param {number | null} sequenceId */
  turnOf(sequenceId) {
    return this.#kept.find((chunk) => chunk.sequenceId === sequenceId)?.turn ?? null;
  }

  /* The server has refused a chunk. Returns its turn; `isOver`: nothing is to come that could be answered; `isOpen`: the
     server has something of it, without its end. */
  /** @param {number} sequenceId */
  refuse(sequenceId) {
    const turn = this.turnOf(sequenceId);
    if (turn === null) return null;
    const chunks = this.#kept.filter((chunk) => chunk.turn === turn);
    for (const chunk of chunks) chunk.refused ||= chunk.sequenceId === sequenceId;
    const taken = chunks.filter(({ refused }) => !refused);
    const isOpen = taken.some(({ payload, toolCallId }) => payload.length > 0 || toolCallId !== null);
    // Results of tools need no end.
    const isOver = chunks.some(({ endOfInput, refused, toolCallId }) => (endOfInput && (refused || !isOpen)) || (toolCallId && !isOpen));
    return { turn, isOver, isOpen };
  }

  /** @param {number | null} turn */
  hasBegun(turn) {
    return this.#begun.has(turn);
  }

  /* The server has everything below `next`. Returns whether it never had all of that before. */
  /** @param {number} next */
  acknowledge(next) {
    let isNew = false;
    for (const chunk of this.#kept) {
      if (chunk.sequenceId >= next) break;
      if (chunk.sequenceId >= this.#acknowledged) this.#unacknowledgedBytes -= chunk.payload.byteLength;
      isNew ||= !chunk.taken;
      chunk.taken = true;
    }
    this.#acknowledged = Math.max(this.#acknowledged, next);
    this.#drop();
    return isNew;
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

  /* A new session that knows nothing: the frames of every turn that was not answered, under new numbers, and which turns
     those are. What an open microphone said is gone, and so are the results of calls that it did not make. `lost` are turns
     of which a part is, and those with a chunk of more than `maxChunkBytes` that cannot be cut. */
  restart(maxChunkBytes = Infinity) {
    this.#kept = this.#kept.flatMap((chunk) => cut(chunk, maxChunkBytes));
    const outgrown = this.#kept.filter(({ payload }) => payload.byteLength > maxChunkBytes);
    const tooLarge = new Set(outgrown.map(({ turn }) => turn));
    /** @type {Set<number>} */
    const turns = new Set();
    /** @type {Set<number | null>} */
    const lost = new Set([...this.#incomplete, ...tooLarge].filter((turn) => turn !== null && !this.#answered.has(turn)));
    this.#kept = this.#kept.filter(({ turn, toolCallId }) => {
      if (turn === null || toolCallId !== null || this.#answered.has(turn) || lost.has(turn)) return false;
      turns.add(turn);
      return true;
    });
    this.#kept.forEach((chunk, place) => Object.assign(chunk, { sequenceId: place, refused: false }));
    for (const turn of lost) this.#gone.add(turn);
    this.#incomplete.clear();
    this.#next = this.#kept.length;
    this.#acknowledged = 0;
    this.#keptBytes = this.#kept.reduce((sum, chunk) => sum + chunk.payload.byteLength, 0);
    this.#unacknowledgedBytes = this.#keptBytes;
    return { frames: this.#kept.map(encodeInput), turns, lost, tooLarge };
  }

  /* Give a turn up: the session that begins next gets nothing of it. */
  /** @param {number} turn */
  giveUp(turn) {
    this.#gone.add(turn);
    this.#incomplete.delete(turn);
    this.#kept = this.#kept.filter(({ turn: of, sequenceId, payload }) => {
      if (of !== turn) return true;
      this.#keptBytes -= payload.byteLength;
      if (sequenceId >= this.#acknowledged) this.#unacknowledgedBytes -= payload.byteLength;
      return false;
    });
  }

  /* What the server has is forgotten where there is no room for what it has not, the largest turn first. */
  #makeRoom() {
    while (this.#keptBytes > this.maxBytes) {
      /** @type {Map<number | null, number>} */
      const sizes = new Map();
      for (const { turn, sequenceId, payload } of this.#kept) {
        if (sequenceId < this.#acknowledged) sizes.set(turn, (sizes.get(turn) ?? 0) + payload.byteLength);
      }
      const [largest] = [...sizes].sort(([, one], [, other]) => other - one);
      if (!largest) return;
      const [turn, bytes] = largest;
      this.#incomplete.add(turn);
      this.#kept = this.#kept.filter((chunk) => chunk.turn !== turn || chunk.sequenceId >= this.#acknowledged);
      this.#keptBytes -= bytes;
    }
  }

  #drop() {
    this.#kept = this.#kept.filter((chunk) => {
      const { sequenceId, turn } = chunk;
      const mayBeAsked = turn !== null && !this.#answered.has(turn) && !this.#incomplete.has(turn);
      if (sequenceId >= this.#acknowledged || mayBeAsked) return true;
      this.#keptBytes -= chunk.payload.byteLength;
      return false;
    });
  }
}
