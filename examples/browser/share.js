/* The conversation of this page as a file to give to others: both sides in turn, as far as each was heard. */

import { fileName, sharedFile } from "./calls/shared-file.js";
import { spansOf } from "./calls/waterfall.js";
import { timesOf } from "./developer.js";
import { cut, download } from "./recording.js";

const PAUSE_MS = 400;
/* Silence is given in pieces of so many samples. */
const PIECE_FRAMES = 1 << 16;

/* `voice` is the name of the voice that answered. Raises an Error. */
export async function shareConversation(turns, rate, voice) {
  const response = await fetch(new URL("browser/calls/shared.html", document.baseURI));
  if (!response.ok) throw new Error(`the server responded with status ${response.status}`);
  const line = new Line(rate ?? 48_000);
  const call = { started: turns[0].startedAt, voice, turns: turns.map((turn) => line.place(turn)), left_out: missing(turns) };
  const file = await sharedFile(await response.text(), { ...call, duration_ms: line.nowMs }, rate === null ? null : line);
  download(file, fileName(call.started));
}

function missing(turns) {
  const pictures = turns.reduce((sum, { user }) => sum + user.images.length, 0);
  const silent = turns.filter(({ kind, sound, user }) => kind !== "written" && user.text && !sound.user.length && !sound.server.length).length;
  return [
    pictures && `Pictures that were shown are left out: ${pictures}.`,
    silent && `Turns of which the page had no sound any more: ${silent}.`,
    turns.some(({ answer }) => answer.calls.length) && "What tools were asked, and what they gave, is left out.",
  ].filter(Boolean);
}

/* Turns one behind the other, with the waits that there were between speech and answer. */
class Line {
  #pieces = []; // [side, Int16Array], or [null, samples] of silence
  #frames = 0;

  constructor(rate) {
    this.rate = rate;
  }

  get nowMs() {
    return (this.#frames / this.rate) * 1000;
  }

  /* A turn as call.json has it. */
  place(turn) {
    const { user: asked, answer: given, sound, heardMs, firstSoundMs } = turn;
    const begin = this.nowMs;
    this.#say("user", sound.user);
    const spoke = this.nowMs;
    const said = spoke > begin ? { start_ms: begin, end_ms: spoke } : {};
    // The browser is not told when each word was said.
    const words = spoke > begin && asked.text ? [{ text: asked.text, ...said }] : [];
    const user = { text: asked.text, ...said, words };
    const stopped = given.state === "stopped";
    const unheard = stopped && heardMs === null; // it was stopped before it sounded
    const heard = cut(sound.server, unheard ? 0 : Math.round(((heardMs ?? Infinity) / 1000) * this.rate));
    if (heard.length) this.#wait(firstSoundMs ?? PAUSE_MS);
    const sounds = this.nowMs;
    this.#say("answer", heard);
    const answer = {
      text: given.text,
      words: given.words.map(({ text, start_ms: start, end_ms: end }) => ({ text, start_ms: sounds + start, end_ms: sounds + end })),
      ...((heard.length || stopped) && { start_ms: sounds, end_ms: this.nowMs }),
      ...(stopped && { cut_ms: heardMs ?? 0 }),
    };
    const spans = spansOf(timesOf(turn)).map(({ stage, start, end }) => ({ name: stage, start_ms: spoke + start, end_ms: spoke + end }));
    this.#wait(PAUSE_MS);
    return {
      user,
      answer,
      spans,
      times: { request_started: begin },
      finish_reason: given.finishReason,
      error: given.error,
    };
  }

  #say(side, pieces) {
    for (const piece of pieces) {
      this.#pieces.push([side, piece]);
      this.#frames += piece.length;
    }
  }

  #wait(ms) {
    const count = Math.round((ms / 1000) * this.rate);
    this.#pieces.push([null, count]);
    this.#frames += count;
  }

  *read(from, count) {
    let place = 0;
    for (const [side, samples] of this.#pieces) {
      const length = side ? samples.length : samples;
      const begin = Math.max(0, from - place);
      const end = Math.min(length, from + count - place);
      place += length;
      for (let at = begin; at < end; at += PIECE_FRAMES) {
        const stop = Math.min(end, at + PIECE_FRAMES);
        yield side ? { [side]: samples.subarray(at, stop) } : { user: new Int16Array(stop - at) };
      }
    }
  }
}
