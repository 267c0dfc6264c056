/* A conversation as one HTML file to give to others: what was said, the sound, and what each turn waited for. It works without
   a server and without a network. Only what is named here gets into it: no ids, no keys, no frames, no results of tools. */

import { canEncode, oggOpus } from "./ogg-opus.js";
import { beginOf } from "./transcript.js";

/* Of a longer conversation the newest part is in the file, which says what it leaves out. */
export const MOST_MS = 30 * 60_000;
export const MOST_TURNS = 1000;
const PEAKS = 1200;
const PEAK_LEVELS = 255;
const DATA_PLACE = "/*CALL*/null";
const SOUND_PLACE = "data:,";

/* `call` has { started, duration_ms, turns, voice, left_out } as call.json has them, `voice` being that of the answers and
   `left_out` sentences of what is missing already. `sound` is null, or { rate, read(from, frames) } whose `read` gives
   pieces { user, answer }, each an Int16Array or null for silence. Raises an Error. */
export async function sharedFile(template, call, sound) {
  const { begin, turns, leftOut } = newest(call);
  const length = Math.min(MOST_MS, call.duration_ms - begin);
  const told = { started: call.started, duration_ms: Math.round(length), voice: call.voice ?? null, turns: turns.map((turn) => toldOf(turn, begin)), left_out: leftOut };
  let heard = "";
  if (sound && length > 0 && (await canEncode(sound.rate))) {
    const frames = Math.ceil((length / 1000) * sound.rate);
    const peaks = new Peaks(frames);
    const ogg = await oggOpus(mixed(sound.read(Math.round((begin / 1000) * sound.rate), frames), peaks), sound.rate);
    told.peaks = peaks.levels;
    heard = await dataAddress(ogg);
  } else if (sound && length > 0) {
    leftOut.push("The sound is left out: the browser that made this file cannot compress sound.");
  }
  // Without "<" no text can end the element that it stands in.
  const data = JSON.stringify(told).replaceAll("<", "\\u003c");
  const [before, between, after] = partsOf(template);
  return new Blob([before, heard, between, data, after], { type: "text/html" });
}

/* The name under which it is saved. */
export const fileName = (started) => `conversation-${new Date(started).toISOString().slice(0, 19).replaceAll(":", "-")}.html`;

function newest({ turns, duration_ms: duration, left_out: before = [] }) {
  const earliest = Math.max(0, duration - MOST_MS);
  const fits = turns.findIndex((turn) => beginOf(turn) >= earliest);
  const first = Math.max(fits < 0 ? turns.length - 1 : fits, turns.length - MOST_TURNS, 0);
  if (first === 0 && earliest === 0) return { begin: 0, turns, leftOut: [...before] };
  const begin = Math.max(earliest, turns.length ? beginOf(turns[first]) : 0);
  const minutes = Math.max(1, Math.round(begin / 60_000));
  const missing = `The begin is left out: ${first} of ${turns.length} turns, ${minutes} min.`;
  return { begin, turns: turns.slice(first), leftOut: [missing, ...before] };
}

function toldOf({ user, answer, spans = [], times, finish_reason: reason, error }, begin) {
  const at = (ms) => (Number.isFinite(ms) ? Math.round((ms - begin) * 10) / 10 : undefined);
  const said = (side) =>
    side && {
      text: side.text,
      start_ms: at(side.start_ms),
      end_ms: at(side.end_ms),
      cut_ms: Number.isFinite(side.cut_ms) ? side.cut_ms : undefined,
      words: side.words?.map(({ text, start_ms: start, end_ms: end }) => ({ text, start_ms: at(start), end_ms: at(end) })),
    };
  return {
    user: said(user),
    answer: said(answer),
    times: { request_started: at(beginOf({ user, answer, times })) },
    spans: spans.map(({ name, start_ms: start, end_ms: end }) => ({ name, start_ms: at(start), end_ms: at(end) })),
    finish_reason: reason,
    error: error ? "no answer came" : undefined, // a reason may name servers
  };
}

/* Both sides in one channel. */
async function* mixed(pieces, peaks) {
  for await (const { user, answer } of pieces) {
    peaks.add(user, answer);
    if (!user || !answer) yield user ?? answer;
    else yield user.map((sample, place) => Math.max(-32768, Math.min(32767, sample + answer[place])));
  }
}

/* How loud each side is, for the picture. */
class Peaks {
  #frame = 0;

  constructor(frames) {
    this.frames = frames;
    this.levels = [new Array(PEAKS).fill(0), new Array(PEAKS).fill(0)];
  }

  add(...sides) {
    for (const [side, samples] of sides.entries()) {
      for (const [place, sample] of samples?.entries() ?? []) {
        const bucket = Math.min(PEAKS - 1, Math.floor(((this.#frame + place) / this.frames) * PEAKS));
        const level = Math.round((Math.abs(sample) / 32768) * PEAK_LEVELS);
        if (level > this.levels[side][bucket]) this.levels[side][bucket] = level;
      }
    }
    this.#frame += sides.find(Boolean).length;
  }
}

function partsOf(template) {
  const [before, rest] = split(template, SOUND_PLACE);
  return [before, ...split(rest, DATA_PLACE)];
}

function split(text, mark) {
  const place = text.indexOf(mark);
  if (place < 0) throw new Error("the page for shared conversations is not that of this server");
  return [text.slice(0, place), text.slice(place + mark.length)];
}

function dataAddress(blob) {
  return new Promise((done, failed) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => failed(reader.error);
    reader.readAsDataURL(blob);
  });
}
