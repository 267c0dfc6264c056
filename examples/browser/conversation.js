/* What was said, turn by turn. A turn is what the person said or wrote and what was answered; requests of the server are
   matched to turns in the order in which both began. Events: `change` { turn }. */

/* Recorded sound that is kept for the download, in samples of both sides together. */
const MAX_KEPT_SAMPLES = 50_000_000;

export class Conversation extends EventTarget {
  turns = [];
  #byRequest = new Map();
  #named = null;
  #keptSamples = 0;

  /* The turn whose answer is awaited or under way, or null. */
  get current() {
    return this.turns.findLast((turn) => isOwed(turn)) ?? null;
  }

  /* `kind` is spoken (with the page's own button), heard (the server noticed it) or written. */
  begin(kind, { text = "", images = [] } = {}) {
    const turn = {
      number: this.turns.length,
      kind,
      startedAt: new Date(),
      user: { text, interim: "", images, done: kind === "written" },
      answer: { text: "", state: kind === "written" ? "thinking" : "none", error: "", finishReason: null, usage: null },
      requestId: null,
      unwanted: false,
      speechEndedAt: null,
      firstSoundMs: null,
      heardMs: null,
      sound: { user: [], server: [] },
    };
    this.turns.push(turn);
    this.#changed(turn);
    return turn;
  }

  /* The person has said it all; `at` is performance.now() of that. */
  endSpeech(turn, at) {
    turn.user.done = true;
    turn.speechEndedAt = at;
    if (turn.answer.state === "none") turn.answer.state = "thinking";
    this.#changed(turn);
  }

  /* Nobody wants to hear more of it: what still comes is not shown. */
  stop(turn) {
    turn.unwanted = true;
    if (turn.answer.state === "thinking" || turn.answer.state === "speaking") turn.answer.state = "stopped";
    turn.user.done = true;
    this.#changed(turn);
  }

  heard(turn, { firstSoundMs, heardMs }) {
    if (firstSoundMs !== undefined) turn.firstSoundMs = firstSoundMs;
    if (heardMs !== undefined) turn.heardMs = heardMs;
    this.#changed(turn);
  }

  keepSound(turn, side, samples) {
    turn.sound[side].push(samples);
    this.#keptSamples += samples.length;
    for (const old of this.turns) {
      if (this.#keptSamples <= MAX_KEPT_SAMPLES) break;
      for (const pieces of Object.values(old.sound)) {
        for (const piece of pieces.splice(0)) this.#keptSamples -= piece.length;
      }
    }
  }

  /* A session that the server does not know any more. Turns whose number is in `resent` were asked again. */
  lose(resent) {
    this.#byRequest.clear();
    this.#named = null;
    for (const turn of this.turns) {
      if (!isOwed(turn) && turn.user.done) continue;
      turn.requestId = null;
      if (resent.has(turn.number)) {
        turn.user.text = turn.kind === "written" ? turn.user.text : ""; // it is listened to again
        continue;
      }
      turn.user.done = true;
      turn.user.interim = "";
      turn.answer.state = "failed";
      turn.answer.error = "The connection was lost before this was answered. Please say it again.";
      this.#changed(turn);
    }
  }

  /* Takes one frame of the server in. Returns its turn, or null where it belongs to none. */
  apply(frame) {
    if (frame.type === "audio") return this.#named;
    const requestId = frame.request_id ?? frame.error?.request_id;
    if (!requestId) return null;
    const turn = this.#turnOf(requestId);
    if (frame.type === "output_chunk") this.#output(turn, frame);
    if (frame.type === "error") turn.answer.error = frame.error.code;
    if (frame.type !== "error") this.#named = turn;
    this.#changed(turn);
    return turn;
  }

  #turnOf(requestId) {
    let turn = this.#byRequest.get(requestId);
    if (!turn) {
      turn = this.turns.find((one) => one.requestId === null && !isOver(one)) ?? this.begin("heard");
      turn.requestId = requestId;
      this.#byRequest.set(requestId, turn);
    }
    return turn;
  }

  #output(turn, frame) {
    const { user, answer } = turn;
    if (frame.final) {
      this.#byRequest.delete(frame.request_id);
      answer.finishReason = frame.finish_reason;
      answer.usage = frame.usage ?? null;
      user.done = true;
      user.interim = "";
      const ended = { cancelled: "stopped", error: "failed" }[frame.finish_reason] ?? "done";
      answer.state = turn.unwanted ? "stopped" : ended; // it may have been complete when it was stopped
    } else if (frame.modality === "transcript") {
      if (frame.interim) user.interim = frame.text;
      else {
        user.text = joined(user.text, frame.text);
        user.interim = "";
      }
    } else if (!turn.unwanted) {
      answer.state = "speaking";
      if (frame.modality === "text") answer.text += frame.text;
    }
  }

  #changed(turn) {
    this.dispatchEvent(new CustomEvent("change", { detail: { turn } }));
  }
}

/* An answer is awaited, or comes. */
export function isOwed({ answer }) {
  return answer.state === "thinking" || answer.state === "speaking";
}

function isOver({ answer }) {
  return answer.finishReason !== null || answer.state === "failed";
}

function joined(before, text) {
  return before && text && !/\s$/.test(before) && !/^\s/.test(text) ? `${before} ${text}` : before + text;
}
