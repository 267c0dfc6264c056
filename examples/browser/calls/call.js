/* The page of one recorded call: its sound, what was said, what each turn waited for, and the frames. */

import { element, Messages } from "../page.js";
import { duration } from "../plain-words.js";
import { currentKey } from "../settings.js";
import { ask, askJson, clock, day, make } from "./access.js";
import { Fork } from "./fork.js";
import { Frames } from "./frames.js";
import { Transcript, beginOf, endOf } from "./transcript.js";
import { waterfall } from "./waterfall.js";
import { Wave, peaksOf } from "./wave.js";

/* How far the arrow keys go. */
const STEP_MS = 5000;
const COPIED_SEC = 3;

const messages = new Messages(element("messages"));
const sound = element("sound");
const wave = new Wave(element("wave"));
const base = new URL(`${location.pathname.replace(/\/$/, "").split("/").at(-1)}/`, document.baseURI);
const transcript = new Transcript(element("conversation"), element("turns"), {
  jump: (place, ms) => jump(ms, place),
  link: (place) => copyLink(`turn=${place + 1}`),
  fork: (place) => fork.begin({ place, turn: transcript.turns[place] }),
});
const frames = new Frames(element("wire"), element("frames"), { filter: element("wire-filter"), count: element("frame-count") });
const fork = new Fork(base, { hear: (from, to) => hear(from, to) });
let call = null;
let selected = -1;
let stopAt = null; // where a piece that is heard alone ends

try {
  show(await askJson(new URL("call.json", base)));
} catch (error) {
  element("about").textContent = "";
  messages.show("call", error.message, { label: "Try again", action: () => location.reload() });
}

async function show(found) {
  call = found;
  const { started, duration_ms: length, model, key, turns = [] } = call;
  const facts = [day(started), clock(length), call.kind, model, key && `key ${key}`];
  element("about").textContent = facts.filter(Boolean).join(" · ");
  document.title = `Call of ${day(started)}`;
  element("length").textContent = clock(length);
  element("wave").setAttribute("aria-valuemax", Math.round(length / 1000));
  transcript.canFork = call.can_fork === true;
  element("fork").parentElement.hidden = !transcript.canFork;
  for (const id of ["llm", "voice"]) {
    const known = call.fork_choices?.[id] ?? [];
    element(`fork-${id}s`).replaceChildren(...known.map((value) => Object.assign(make("option"), { value })));
    element("fork-form").elements[id].closest("label").hidden = id === "llm" && known.length === 0;
  }
  transcript.show(turns);
  wave.show(turns, length);
  frames.show(call.events ?? [], call.events_left_out ?? 0);
  element("nothing-said").hidden = turns.length > 0;
  if (call.recorded?.payloads === false) {
    const text = "Only the structure of this call was recorded, not what was said: there is no sound, and no text.";
    messages.show("payloads", text, { kind: "plain" });
  } else if (call.recorded?.cut) {
    messages.show("cut", `The recording was cut: ${call.recorded.cut}`, { kind: "busy" });
  }
  element("download").href = new URL("call.zip", base);
  element("player").hidden = !call.sound;
  if (call.sound) loadSound().catch((error) => messages.show("sound", `The sound cannot be had: ${error.message}`));
  select(0);
  goToHash();
}

/* Where a key is needed the element cannot ask for the sound by itself. */
async function loadSound() {
  const address = new URL("sound.wav", base);
  const response = await ask(address); // first: the element would not learn why there is no sound
  const pieces = currentKey() ? [] : null;
  if (!pieces) sound.src = address;
  const peaks = await peaksOf(response, pieces && ((piece) => pieces.push(piece)));
  if (pieces) sound.src = URL.createObjectURL(new Blob(pieces, { type: "audio/wav" }));
  if (peaks) wave.peaks(peaks);
}

sound.addEventListener("error", () => messages.show("sound", "The browser cannot play the sound of this call."));

// --- where it is

const nowMs = () => sound.currentTime * 1000;

function jump(ms, place = transcript.placeAt(ms)) {
  stopAt = null;
  if (call?.sound) sound.currentTime = Math.min(ms, call.duration_ms) / 1000;
  select(place, { reveal: true });
  tell(ms);
}

function hear(from, to) {
  jump(from);
  stopAt = to;
  sound.play();
}

function select(place, { reveal = false } = {}) {
  const turn = transcript.turns[place];
  if (!turn) return;
  const isNew = place !== selected;
  selected = place;
  transcript.select(place, { reveal });
  if (isNew) showTurn(turn, place);
}

function tell(ms) {
  const seconds = Math.round(ms / 1000);
  if (element("now").textContent !== clock(ms)) element("now").textContent = clock(ms);
  const slider = element("wave");
  if (slider.getAttribute("aria-valuenow") !== String(seconds)) {
    slider.setAttribute("aria-valuenow", seconds);
    slider.setAttribute("aria-valuetext", `${clock(ms)} of ${clock(call?.duration_ms ?? 0)}`);
  }
  const turn = transcript.turns[selected];
  wave.at(ms, turn ? [beginOf(turn), endOf(turn)] : null);
  transcript.mark(ms);
}

function tick() {
  const ms = nowMs();
  if (stopAt !== null && ms >= stopAt) sound.pause();
  const place = transcript.placeAt(ms);
  if (place !== selected && !sound.paused) select(place, { reveal: transcript.follows });
  tell(ms);
  if (!sound.paused) requestAnimationFrame(tick);
}

for (const kind of ["play", "pause"]) {
  sound.addEventListener(kind, () => {
    element("play").setAttribute("aria-label", sound.paused ? "Play" : "Pause");
    element("play").querySelector("use").setAttribute("href", sound.paused ? "#i-play" : "#i-pause");
    requestAnimationFrame(tick);
  });
}
for (const kind of ["seeked", "timeupdate", "loadedmetadata"]) sound.addEventListener(kind, () => tell(nowMs()));

const toggle = () => (sound.paused ? sound.play().catch(() => {}) : sound.pause());
element("play").onclick = toggle;
element("rate").onchange = () => (sound.playbackRate = Number(element("rate").value));

element("wave").addEventListener("pointerdown", (event) => {
  element("wave").setPointerCapture(event.pointerId);
  jump(wave.timeAt(event.clientX));
});
element("wave").addEventListener("pointermove", (event) => {
  if (element("wave").hasPointerCapture(event.pointerId)) jump(wave.timeAt(event.clientX));
});

// --- the selected turn

function showTurn(turn, place) {
  element("turn-title").textContent = `Turn ${place + 1} of ${transcript.turns.length}`;
  // The speech before and the sound behind last longer than all that somebody waited for.
  const waits = (turn.spans ?? []).filter(({ name }) => name !== "speech" && name !== "answer");
  const spans = waits.map(({ name, start_ms: start, end_ms: end }) => ({ stage: name, start, end }));
  const facts = [
    ["request", turn.request_id],
    ["ended by", turn.finish_reason],
    ["thrown away", turn.discarded_ms && duration(turn.discarded_ms)],
    ["tokens", turn.usage && `${turn.usage.input_tokens} in, ${turn.usage.output_tokens} out`],
  ];
  element("turn-facts").replaceChildren(
    ...facts.filter(([, value]) => value).flatMap(([name, value]) => [make("dt", "", name), make("dd", "", String(value))]),
  );
  const bounds = { begin: Math.min(...spans.map(({ start }) => start)), end: Math.max(...spans.map(({ end }) => end)) };
  const nothing = make("p", "note", "No times were recorded of this turn.");
  element("turn-fall").replaceChildren(spans.length ? waterfall({ spans, ...bounds }) : nothing);
  fork.select({ place, turn });
}

element("turn-frames").onclick = () => {
  showPane("frames");
  frames.reveal(beginOf(transcript.turns[selected]));
};

/* On a small screen one part is shown at a time. */
function showPane(name) {
  document.body.dataset.pane = name;
  element(`pane-${name}`).checked = true;
}
for (const radio of document.querySelectorAll("input[name=pane]")) radio.onchange = () => showPane(radio.value);

// --- links and keys

function goToHash() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  if (wanted.has("turn")) {
    const name = wanted.get("turn");
    const byId = transcript.turns.findIndex(({ request_id: id, turn_id: other }) => id === name || other === name);
    const place = byId >= 0 ? byId : Number(name) - 1;
    if (transcript.turns[place]) jump(beginOf(transcript.turns[place]), place);
  } else if (wanted.has("t")) {
    const ms = Number(wanted.get("t")) * 1000;
    if (ms >= 0) jump(ms);
  }
}
addEventListener("hashchange", goToHash);

async function copyLink(moment) {
  const link = new URL(location);
  link.hash = moment;
  try {
    await navigator.clipboard.writeText(link.href);
    messages.show("copied", `The link was copied: ${link.hash}`, { kind: "plain", seconds: COPIED_SEC });
  } catch {
    location.hash = link.hash;
    messages.show("copied", "The browser does not let this page copy; the address of the page is the link now.", { kind: "plain" });
  }
}
element("copy-link").onclick = () => copyLink(`t=${(nowMs() / 1000).toFixed(1)}`);

/* A link cannot carry the key. */
element("download").onclick = async (event) => {
  if (!currentKey()) return;
  event.preventDefault();
  try {
    const link = make("a");
    link.href = URL.createObjectURL(await (await ask(new URL("call.zip", base))).blob());
    link.download = `${call.id}.zip`;
    link.click();
    URL.revokeObjectURL(link.href);
  } catch (error) {
    messages.show("download", error.message);
  }
};

const KEYS = {
  ArrowLeft: () => jump(Math.max(0, nowMs() - STEP_MS)),
  ArrowRight: () => jump(nowMs() + STEP_MS),
  Home: () => jump(0),
  End: () => jump(call.duration_ms),
  ",": () => word(-1),
  ".": () => word(1),
  j: () => turn(1),
  k: () => turn(-1),
  " ": toggle,
};

function word(way) {
  const ms = transcript.wordFrom(nowMs(), way);
  if (ms !== null) jump(ms);
}

function turn(way) {
  const next = Math.min(transcript.turns.length - 1, Math.max(0, selected + way));
  if (transcript.turns[next]) jump(beginOf(transcript.turns[next]), next);
}

addEventListener("keydown", (event) => {
  const { key, target } = event;
  if (event.ctrlKey || event.metaKey || event.altKey || event.shiftKey || !call || document.querySelector("dialog[open]")) return;
  if (target.closest("input, select, textarea") || (key === " " && target.closest("button, a, summary"))) return;
  if ((key === "Home" || key === "End") && target !== element("wave")) return; // elsewhere they scroll
  if (!Object.hasOwn(KEYS, key)) return;
  event.preventDefault();
  KEYS[key]();
});
