/* What somebody waited for, drawn: a row for each stage with bars where it worked, and the rest hatched. The demo page, the
   page of a recorded call and the profiler's page, which has this file within it, draw with this module alone. Its
   classes are in waterfall.css.
   A span is { stage, start, end, name?, thin? }, in milliseconds from any origin. A thin one tells that a stage was there,
   and accounts for no time. */

/* Colours 0 to 7 of waterfall.css; a stage that is not listed gets one by its place. */
const PRESET = {
  input: 0, queue: 1, decode: 4, asr: 4, recogniser: 2, llm: 2, thinker: 2, tts: 3, voice: 3, talker: 3, code2wav: 6, answer: 7,
  transport: 5, brain: 6, sights: 6, "read aloud": 2, upstream: 2, engine: 0,
  turn_decision: 0, recognition: 4, llm_first_token: 2, first_clause: 6, sending: 5, playing: 7,
};
export const UNACCOUNTED = "unaccounted";

/* "0.123 ms", "4.5 ms", "340 ms", "2.29 s", "12.3 s". */
export function shownTime(ms) {
  if (ms === null || ms === undefined) return "–";
  if (Math.abs(ms) >= 1000) return `${(ms / 1000).toFixed(Math.abs(ms) < 10_000 ? 2 : 1)}\u00a0s`;
  return `${ms.toFixed(ms === 0 || Math.abs(ms) >= 100 ? 0 : Math.abs(ms) >= 1 ? 1 : 3)}\u00a0ms`;
}

/* The stages in the order in which they begin. */
export function stagesOf(spans) {
  const first = new Map();
  for (const { stage, start } of spans) first.set(stage, Math.min(start, first.get(stage) ?? Infinity));
  return [...first].sort((one, other) => one[1] - other[1]).map(([stage]) => stage);
}

export function colourOf(stage, stages) {
  const preset = Object.hasOwn(PRESET, stage) ? PRESET[stage] : Math.max(0, stages.indexOf(stage)) % 8;
  return `var(--stage-${preset})`;
}

/* The times within [begin, end] that no span but a thin one covers. */
export function gapsOf(spans, begin, end) {
  const gaps = [];
  let reached = begin;
  for (const span of spans.filter(({ thin }) => !thin).sort((one, other) => one.start - other.start)) {
    if (span.start >= end) break;
    if (span.start > reached) gaps.push([reached, span.start]);
    reached = Math.max(reached, span.end);
  }
  if (reached < end) gaps.push([reached, end]);
  return gaps;
}

/* All of it: an axis, a row for each stage with the time that it took, and one for what is unaccounted for. `marks` are
   single events: { stage, at, name }. */
export function waterfall({ spans, marks = [], begin = 0, end }) {
  const fall = drawn("ol", "waterfall");
  const whole = Math.max(end - begin, 0.001);
  const within = spans.filter((span) => span.start < end && span.end > begin);
  const points = marks.filter(({ at }) => at >= begin && at <= end);
  const stages = stagesOf([...within, ...points.map(({ stage, at }) => ({ stage, start: at }))]);
  fall.append(axis(whole));
  for (const stage of stages) {
    const own = within.filter((span) => span.stage === stage);
    const covered = whole - sum(gapsOf(own, begin, end));
    const lane = row(fall, stage, covered);
    for (const span of own) {
      const bar = placed("i", span.thin ? "thin" : "", Math.max(span.start, begin), Math.min(span.end, end), begin, whole);
      bar.style.background = colourOf(stage, stages);
      bar.title = `${label(stage)}${span.name ? `: ${span.name}` : ""}, ${shownTime(span.end - span.start)} (from ${shownTime(span.start - begin)})`;
      lane.append(bar);
    }
    for (const { at, name } of points.filter((mark) => mark.stage === stage)) {
      const mark = placed("i", "mark", at, at, begin, whole);
      mark.title = `${name} at ${shownTime(at - begin)}`;
      lane.append(mark);
    }
  }
  const gaps = gapsOf(within, begin, end);
  if (gaps.length) {
    const lane = row(fall, UNACCOUNTED, sum(gaps));
    for (const [from, to] of gaps) {
      const bar = placed("i", "gap", from, to, begin, whole);
      bar.title = `${UNACCOUNTED}: ${shownTime(to - from)} (from ${shownTime(from - begin)})`;
      lane.append(bar);
    }
  }
  return fall;
}

/* What a turn of a call waited for. `spans` are { name, start_ms, end_ms }. */
export function turnFall(spans) {
  // The speech before and the sound behind last longer than all that somebody waited for.
  const waits = spans.filter(({ name }) => name !== "speech" && name !== "answer");
  if (!waits.length) return drawn("p", "note", "No times were recorded of this turn.");
  const begin = Math.min(...waits.map((span) => span.start_ms));
  const end = Math.max(...waits.map((span) => span.end_ms));
  return waterfall({ spans: waits.map(({ name, start_ms: start, end_ms: stop }) => ({ stage: name, start, end: stop })), begin, end });
}

/* All of it in one line, among others from `begin` to `end`. */
export function strip(spans, begin, end, stages = stagesOf(spans)) {
  const track = drawn("span", "strip");
  for (const { stage, start, end: stop, thin } of spans) {
    if (thin) continue;
    const bar = placed("i", "", start, Math.min(stop, end), begin, Math.max(end - begin, 0.001));
    bar.style.background = colourOf(stage, stages);
    track.append(bar);
  }
  return track;
}

/* The colour of each stage. */
export function legend(stages) {
  const list = drawn("ul", "legend");
  for (const stage of stages) {
    const entry = drawn("li", "");
    const swatch = drawn("i", "");
    swatch.style.background = colourOf(stage, stages);
    entry.append(swatch, label(stage));
    list.append(entry);
  }
  return list;
}

/* The parts of the time from the end of the speech to the first sound, each with the moment at which it ends: those of
   omni_ws/core/chunks.py. */
const PARTS = [
  ["turn_decision", "turn_decided"],
  ["queue", "engine_started"],
  ["recognition", "transcript_settled"],
  ["llm_first_token", "first_token"],
  ["first_clause", "first_clause"],
  ["voice", "first_audio_made"],
  ["sending", "first_audio_sent"],
  ["playing", "first_audio_played"],
];

/* The times of one answer (`times` of a final, in milliseconds, with the end of the speech at `begin`) as spans, one after the other.
   What was ready before takes no time of its own. */
export function spansOf(times, begin = 0) {
  const spans = [];
  let last = begin;
  for (const [stage, moment] of PARTS) {
    const end = times[moment];
    // An LLM that hears by itself does not wait for the transcript.
    if (!Number.isFinite(end) || (moment === "transcript_settled" && end > (times.first_token ?? end))) continue;
    if (end > last) spans.push({ stage, start: last, end });
    last = Math.max(last, end);
  }
  return spans;
}

/* As a stage is called on the page. */
const label = (stage) => stage.replaceAll("_", " ").replace(/^llm /, "LLM ");

function row(fall, stage, took) {
  const line = drawn("li", "");
  const lane = drawn("span", "lane");
  line.append(drawn("span", "label", label(stage)), lane, drawn("span", "took", took > 0 ? shownTime(took) : ""));
  fall.append(line);
  return lane;
}

function axis(whole) {
  const line = drawn("li", "axis");
  const scale = drawn("span", "scale");
  line.setAttribute("aria-hidden", "true");
  for (const share of [0, 0.25, 0.5, 0.75, 1]) {
    const label = drawn("span", "", shownTime(whole * share));
    label.style.left = `${100 * share}%`;
    scale.append(label);
  }
  line.append(scale);
  return line;
}

function placed(tag, className, start, end, begin, whole) {
  const bar = drawn(tag, className);
  bar.style.left = `${(100 * (start - begin)) / whole}%`;
  if (end > start) bar.style.width = `${(100 * (end - start)) / whole}%`;
  return bar;
}

const sum = (gaps) => gaps.reduce((total, [from, to]) => total + to - from, 0);

function drawn(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}
