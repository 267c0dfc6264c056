/* What was said, turn by turn. A turn is what the person said or wrote and what was answered. A request of the server says
   whose it is: by the turn's own name (`ref`), by the server's name of what was said (`turn_id`), and from then on by its
   id. No turn outlives its session without being asked again.
   Events: `change` { turn }. */

/** @import { ConversationEvents, Frame, Telling, ToolCall, Turn, Word } from "../client.js" */

/** A turn with what the package and its page remember of it besides; times are those of performance.now().
 @typedef {Turn & {
   unwanted: boolean,
   interrupts: boolean,
   speechEndedAt: number | null,
   stoppedAt?: number,
   heardAt?: number,
   certain?: string,
   at: { firstText: number | null, firstAudio: number | null, transcript: number | null },
   soundEnd?: number,
 }} KeptTurn */
/** @typedef {Turn["answer"]["state"]} AnswerState */

/* Recorded sound that is kept for the download, in samples of both sides together. */
const MAX_KEPT_SAMPLES = 50_000_000;

const UNANSWERED = "The connection was lost before this was answered. Please say it again.";
const NOT_TAKEN = "This was not answered. Please say it again.";
const BROKEN_OFF = "The connection was lost in the middle of this answer.";

/* What the state of an answer may become. All of an answer that is `done` has come, but playing it may be stopped. One
   that is `held` goes on if the speech that interrupted it turns out to have no words. */
/** @type {Record<AnswerState, AnswerState[]>} */
const NEXT = {
  none: ["thinking", "speaking", "done", "stopped", "failed"],
  thinking: ["speaking", "held", "done", "stopped", "failed"],
  speaking: ["held", "done", "stopped", "failed"],
  held: ["speaking", "done", "stopped", "failed"],
  done: ["stopped"],
  stopped: [],
  failed: [],
};
/* What the server says unasked: at the beginning, while a tool works, after a long silence, and what it is given to tell. */
const UNASKED = ["greeting", "filler", "idle", "telling"];
/* Of two turns that turn out to be one, which is kept: what somebody wrote or said with the button. */
/** @type {Record<Turn["kind"], number>} */
const RANK = { tool: 0, greeting: 0, heard: 1, spoken: 2, written: 2 };
/* What an answer has become by the reason for which it ended; "done" for any other. */
/** @type {Record<string, AnswerState>} */
const ENDED = { cancelled: "stopped", error: "failed" };

export class Conversation extends /** @type {Telling<ConversationEvents>} */ (EventTarget) {
  /** @type {KeptTurn[]} */
  turns = [];
  /* Turns whose request the server has not named yet, in their order. */
  /** @type {KeptTurn[]} */
  #awaiting = [];
  /* Whether the server says whose its requests are. */
  isNamed = false;
  /** @type {Map<string, KeptTurn>} */
  #byRequest = new Map();
  /** @type {KeptTurn | null} */
  #named = null;
  #keptSamples = 0;
  /** @type {(() => void)[]} */
  #unsettled = [];

  /* The turn whose answer is awaited or under way, or null. */
  get current() {
    return this.turns.findLast((turn) => isOwed(turn)) ?? null;
  }

  /* The name of the turn that begins next. */
  get nextRef() {
    return `turn-${this.turns.length}`;
  }

  /* `kind` is spoken (with the page's own button), heard (the server noticed it), written, greeting (the server
     speaks unasked), or tool (the page has replied to a call of the answer before). */
  /** @param {Turn["kind"]} kind @param {{ text?: string, images?: string[] }} [given] */
  begin(kind, { text = "", images = [] } = {}) {
    const done = kind === "written" || kind === "tool";
    /** @type {KeptTurn} */
    const turn = {
      number: this.turns.length,
      ref: this.nextRef,
      turnId: null,
      kind,
      startedAt: new Date(),
      user: { text, interim: "", images, done },
      answer: { text: "", words: [], state: done ? "thinking" : "none", error: "", reason: "", finishReason: null, usage: null, times: null, warnings: [], annotations: [], calls: [] },
      requestId: null,
      unwanted: false,
      interrupts: false,
      speechEndedAt: null,
      firstSoundMs: null,
      heardMs: null,
      sound: { user: [], server: [] },
      dropped: false,
      at: { firstText: null, firstAudio: null, transcript: null },
    };
    this.turns.push(turn);
    this.#awaiting.push(turn);
    this.#changed(turn);
    return turn;
  }

  /* The person has said it all; `at` is performance.now() of that. */
  /** @param {KeptTurn} turn @param {number} at */
  endSpeech(turn, at) {
    turn.user.done = true;
    turn.speechEndedAt = at;
    if (turn.answer.state === "none") become(turn, "thinking");
    this.#changed(turn);
  }

  /* Someone speaks: answers that are awaited or under way go on only if that has no words, which the server tells by
     going on. `turn` is what is being said. */
  /** @param {KeptTurn} turn */
  hold(turn) {
    for (const held of this.turns) {
      if (held === turn || !become(held, "held")) continue;
      turn.interrupts = true;
      this.#changed(held);
    }
  }

  /* Nobody wants to hear more of it: what still comes is not shown. */
  /** @param {KeptTurn} turn */
  stop(turn) {
    turn.unwanted = true;
    if (turn.answer.state !== "done") become(turn, "stopped");
    turn.user.done = true;
    this.#changed(turn);
  }

  /* No answer comes to this turn: the server was not asked, or has forgotten it. `why` is a code or a sentence. */
  /** @param {Turn} turn @param {string} why */
  fail(turn, why) {
    this.#awaiting = this.#awaiting.filter((one) => one !== turn);
    turn.user.done = true;
    settle(turn.user);
    if (become(turn, "failed")) turn.answer.error = why;
    this.#changed(turn);
    this.#wakeSettled();
  }

  /* The turn that the server gave this name. */
  /** @param {string} turnId */
  saidAs(turnId) {
    return this.turns.findLast((turn) => turn.turnId === turnId);
  }

  /* What the server says of something that it hears: its name, and the request that it opened or joined. */
  /** @param {KeptTurn} turn @param {Frame} frame */
  hear(turn, { type, turn_id: turnId, request_id: requestId }) {
    if (!turnId) return turn; // a server that says neither
    this.isNamed = true;
    turn.turnId = turnId;
    if (requestId) return this.#assign(requestId, turn);
    if (type === "speech_stopped" && !turn.requestId) this.fail(turn, NOT_TAKEN);
    return turn;
  }

  /* What would follow on the results of tools does not come: the session that asked for them is gone. */
  missResults() {
    this.fail(this.begin("tool"), UNANSWERED);
  }

  /* Playing was stopped: so much was heard. */
  /** @param {Turn} turn @param {number} heardMs */
  cut(turn, heardMs) {
    if (turn.answer.state !== "held") become(turn, "stopped");
    this.heard(turn, { heardMs });
  }

  /** @param {Turn} turn @param {{ firstSoundMs?: number, heardMs?: number }} found */
  heard(turn, { firstSoundMs, heardMs }) {
    if (firstSoundMs !== undefined) turn.firstSoundMs = firstSoundMs;
    if (heardMs !== undefined) turn.heardMs = heardMs;
    this.#changed(turn);
  }

  /* The result that a call got. */
  /** @param {Turn} turn @param {ToolCall} call @param {string} result */
  answerCall(turn, call, result) {
    call.result = result;
    this.#changed(turn);
  }

  /* Forget a turn and those after it, up to the one of the number `end`: they keep their numbers, and are not shown or saved. */
  /** @param {Turn} turn @param {number} [end] */
  drop(turn, end = this.turns.length) {
    for (const one of this.turns.slice(turn.number, end)) {
      one.dropped = true;
      this.#dropSound(one);
      this.#changed(one);
    }
  }

  /* Forget all turns, and what they await. */
  clear() {
    for (const turn of this.turns) {
      if (isOwed(turn)) this.stop(turn);
      turn.user.done = true;
    }
    this.#awaiting = [];
    this.#byRequest.clear();
    this.#named = null;
    if (this.turns.length) this.drop(this.turns[0]);
    this.#wakeSettled();
  }

  /* Resolves when every request that was sent has its final. */
  /** @returns {Promise<void>} */
  settled() {
    return new Promise((resolve) => {
      this.#unsettled.push(resolve);
      this.#wakeSettled();
    });
  }

  #wakeSettled() {
    const open = [...this.#awaiting, ...this.#byRequest.values()].some(({ answer }) => answer.finishReason === null);
    if (!open) for (const resolve of this.#unsettled.splice(0)) resolve();
  }

  /** @param {Turn} turn @param {"user" | "server"} side @param {Int16Array} samples */
  keepSound(turn, side, samples) {
    turn.sound[side].push(samples);
    this.#keptSamples += samples.length;
    for (const old of this.turns) {
      if (this.#keptSamples <= MAX_KEPT_SAMPLES) break;
      this.#dropSound(old);
    }
  }

  /** @param {Turn} turn */
  #dropSound({ sound }) {
    for (const pieces of Object.values(sound)) {
      for (const piece of pieces.splice(0)) this.#keptSamples -= piece.length;
    }
  }

  /* The server has forgotten the session. Turns whose number is in `resent` are asked again, and so is what is being said
     with the button; nothing else of before is answered any more. */
  /** @param {Set<number>} resent */
  lose(resent) {
    this.#byRequest.clear();
    this.#named = null;
    /** @param {Turn} turn */
    const asksAgain = (turn) => resent.has(turn.number) || (turn.kind === "spoken" && !turn.user.done);
    this.#awaiting = this.turns.filter(asksAgain);
    for (const turn of this.turns) {
      if (!asksAgain(turn)) {
        if (isOwed(turn) || !turn.user.done) this.fail(turn, turn.answer.text ? BROKEN_OFF : UNANSWERED);
        else if (settle(turn.user)) this.#changed(turn);
        continue;
      }
      turn.requestId = null;
      Object.assign(turn.answer, { calls: [], error: "", reason: "" });
      if (turn.kind !== "written") turn.user.text = turn.user.interim = ""; // it is listened to again
    }
    this.#wakeSettled();
  }

  /* Takes one frame of the server in. Returns its turn, or null where it belongs to none. */
  /** @param {Frame} frame */
  apply(frame) {
    if (frame.type === "audio") {
      const turn = this.#byRequest.get(frame.request_id) ?? this.#named;
      if (turn?.answer.state === "held") this.#goOn(turn, frame.place);
      if (turn) noteSound(turn, frame);
      return turn;
    }
    const requestId = frame.request_id ?? frame.error?.request_id;
    if (!requestId) return null;
    const turn = this.#turnOf(requestId, frame);
    if (frame.type === "output_chunk") this.#output(turn, frame);
    if (frame.type === "error" && !turn.unwanted) Object.assign(turn.answer, { error: frame.error.code, reason: frame.error.message ?? "" });
    // Sound without a name is that of the answer that was announced last, whatever else was heard or has ended meanwhile.
    if (frame.type !== "error" && !frame.final && frame.modality !== "transcript") this.#named = turn;
    this.#changed(turn);
    return turn;
  }

  /** @param {string} requestId @param {Frame} frame */
  #turnOf(requestId, frame) {
    const { trigger, turn_id: turnId, ref = frame.error?.ref } = frame;
    let turn = this.#byRequest.get(requestId);
    if (turn && !turnId && !ref) return turn;
    this.isNamed ||= Boolean(turnId ?? ref);
    const asked = this.turns.find((one) => one.ref === ref || (!ref && one.number === frame.turn));
    for (const one of [turnId && this.saidAs(turnId), asked]) {
      if (one && !one.requestId && (one.unwanted || this.#awaiting.includes(one))) turn = this.#assign(requestId, one);
    }
    if (turn) return turn;
    turn = ((!this.isNamed || trigger === "telling") && this.#guess(frame)) || undefined;
    const kind = ref && ref !== this.nextRef ? "tool" : "heard";
    return this.#assign(requestId, turn ?? this.#unasked(UNASKED.includes(trigger) ? "greeting" : kind));
  }

  /* A turn that this page did not begin. */
  /** @param {Turn["kind"]} kind */
  #unasked(kind) {
    const turn = this.begin(kind);
    turn.user.done = kind !== "heard";
    return turn;
  }

  /* A server that names nothing says of the first frame of a request, at most, the number of a chunk, which is looked at
     before. What was asked begins to be answered at once; what has its end without a beginning was said and interrupted. */
  /** @param {Frame} frame */
  #guess({ type, trigger, sequence_id: chunk, final, modality }) {
    if (trigger === "telling") return this.#awaiting.find(({ kind, ref }) => kind === "tool" && !ref) ?? null;
    if (UNASKED.includes(trigger)) return null;
    const wasSaid = final || modality === "transcript" || (type === "response_started" && typeof chunk === "number");
    /** @param {boolean} heard */
    const first = (heard) => this.#awaiting.find(({ kind }) => (kind === "heard") === heard);
    return first(Boolean(wasSaid)) ?? first(!wasSaid) ?? null;
  }

  /* A request is that of a turn. What was said, and what was written or replied into it, are one turn. */
  /** @param {string} requestId @param {KeptTurn} turn @returns {KeptTurn} */
  #assign(requestId, turn) {
    const other = this.#byRequest.get(requestId);
    this.#awaiting = this.#awaiting.filter((one) => one !== turn);
    if (other === turn) return turn;
    turn.requestId = requestId;
    this.#byRequest.set(requestId, turn);
    if (!other) return turn;
    const [kept, gone] = RANK[turn.kind] > RANK[other.kind] ? [turn, other] : [other, turn];
    kept.turnId ??= gone.turnId;
    kept.user.text = joined(kept.user.text, joined(gone.user.text, gone.user.interim));
    kept.sound.user.push(...gone.sound.user.splice(0));
    if (this.#named === gone) this.#named = kept;
    Object.assign(gone, { turnId: null, requestId: null, dropped: true });
    become(gone, "stopped");
    this.#changed(gone);
    this.#byRequest.set(requestId, kept);
    return kept;
  }

  /** @param {KeptTurn} turn @param {Frame} frame */
  #output(turn, frame) {
    const { user, answer } = turn;
    if (frame.final) {
      answer.finishReason = frame.finish_reason;
      answer.usage = frame.usage ?? null;
      answer.times = frame.times ?? null;
      answer.warnings = frame.warnings ?? [];
      answer.annotations = frame.annotations ?? [];
      this.#wakeSettled();
      user.done = true;
      turn.certain = user.text;
      settle(user); // what is still to be written down of a request that was cut short takes its place
      become(turn, turn.unwanted ? "stopped" : (ENDED[frame.finish_reason] ?? "done")); // it may have been complete when it was stopped
      join(turn.sound.user);
      join(turn.sound.server);
    } else if (frame.modality === "transcript") {
      turn.at.transcript = performance.now();
      if (frame.late) user.text = turn.certain ?? user.text;
      if (frame.interim) user.interim = frame.text;
      else {
        user.interim = frame.text;
        settle(user);
      }
    } else if (!turn.unwanted) {
      if (answer.state === "held") this.#goOn(turn);
      else become(turn, "speaking");
      if (frame.modality === "text") {
        answer.text += frame.text;
        turn.at.firstText ??= performance.now();
      }
      if (frame.modality === "tool_call") addCall(answer.calls, frame);
    }
  }

  /* A held answer goes on from an earlier sample: drop the audio kept from there on, which was not heard. */
  /** @param {KeptTurn} turn @param {number} [place] */
  #goOn(turn, place = Infinity) {
    become(turn, "speaking");
    turn.heardMs = null;
    const { server } = turn.sound;
    let after = lengthOf(server) - place;
    while (after > 0) {
      const piece = server.pop();
      if (!piece) break;
      this.#keptSamples -= Math.min(after, piece.length);
      if (piece.length > after) server.push(piece.subarray(0, piece.length - after));
      after -= piece.length;
    }
    this.#changed(turn);
  }

  /** @param {Turn} turn */
  #changed(turn) {
    this.dispatchEvent(new CustomEvent("change", { detail: { turn } }));
  }
}

/* When the first sound came, and which words it says when; words of sound that is said again come again. */
/** @param {KeptTurn} turn @param {Frame & { words?: Word[] }} frame */
function noteSound({ answer, at }, { words = [], startMs }) {
  at.firstAudio ??= performance.now();
  if (words.length === 0) return;
  answer.words = answer.words.filter((word) => word.start_ms < Math.min(startMs, words[0].start_ms));
  answer.words.push(...words);
}

/* Makes one of the pieces: an hour of talk has tens of thousands, each an object with a buffer of its own. */
/** @param {Int16Array[]} pieces */
export function join(pieces) {
  if (pieces.length < 2) return;
  const whole = new Int16Array(lengthOf(pieces));
  let place = 0;
  for (const piece of pieces.splice(0)) {
    whole.set(piece, place);
    place += piece.length;
  }
  pieces.push(whole);
}

/** @param {Int16Array[]} pieces */
function lengthOf(pieces) {
  return pieces.reduce((sum, piece) => sum + piece.length, 0);
}

/* A call comes in pieces: its id and name with the first, its arguments with all. */
/** @param {ToolCall[]} calls @param {Frame} frame */
function addCall(calls, { index, id, name, arguments: piece }) {
  calls[index] ??= { id: "", name: "", arguments: "" };
  calls[index].id ||= id ?? "";
  calls[index].name ||= name ?? "";
  calls[index].arguments += piece ?? "";
}

/* An answer is awaited, or comes. */
/** @param {Turn} turn */
export function isOwed({ answer }) {
  return answer.state === "thinking" || answer.state === "speaking" || answer.state === "held";
}

/* The one place where the state of an answer changes. False where it may not become that any more. */
/** @param {Turn} turn @param {AnswerState} state */
function become({ answer }, state) {
  const may = NEXT[answer.state].includes(state);
  if (may) answer.state = state;
  return may;
}

/* What was heard last stays as it was heard. False where there is nothing that was not settled. */
/** @param {Turn["user"]} user */
function settle(user) {
  const open = user.interim !== "";
  user.text = joined(user.text, user.interim);
  user.interim = "";
  return open;
}

/** @param {string} before @param {string} text */
function joined(before, text) {
  return before && text && !/\s$/.test(before) && !/^\s/.test(text) ? `${before} ${text}` : before + text;
}
