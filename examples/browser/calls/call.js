/* The page of one recorded call: its sound, what was said, what each turn waited for, and the frames. */

import { element, Messages } from "../page.js";
import { currentKey } from "../settings.js";
import { ask, askJson } from "./access.js";
import { Fork } from "./fork.js";
import { Frames } from "./frames.js";
import { Player, bindPanes, showPane } from "./player.js";
import { clock, day, duration, make } from "./shown.js";
import { shareCall } from "./share-call.js";
import { beginOf } from "./transcript.js";
import { turnFall } from "./waterfall.js";
import { peaksOf } from "./wave.js";

const COPIED_SEC = 3;

const messages = new Messages(element("messages"));
const base = new URL(`${location.pathname.replace(/\/$/, "").split("/").at(-1)}/`, document.baseURI);
const player = new Player({
  chosen: showTurn,
  link: (place) => copyLink(`turn=${place + 1}`),
  fork: (place) => fork.begin({ place, turn: transcript.turns[place] }),
});
const { sound, transcript } = player;
const frames = new Frames(element("wire"), element("frames"), { filter: element("wire-filter"), count: element("frame-count") });
const fork = new Fork(base, { hear: (from, to) => player.hear(from, to) });
let call = null;

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
  transcript.canFork = call.can_fork === true;
  element("fork").parentElement.hidden = !transcript.canFork;
  for (const id of ["llm", "voice"]) {
    const known = call.fork_choices?.[id] ?? [];
    element(`fork-${id}s`).replaceChildren(...known.map((value) => Object.assign(make("option"), { value })));
    element("fork-form").elements[id].closest("label").hidden = id === "llm" && known.length === 0;
  }
  element("player").hidden = !call.sound;
  player.show(turns, length);
  frames.show(call.events ?? [], call.events_left_out ?? 0);
  if (call.recorded?.payloads === false) {
    const text = "Only the structure of this call was recorded, not what was said: there is no sound, and no text.";
    messages.show("payloads", text, { kind: "plain" });
  } else if (call.recorded?.cut) {
    messages.show("cut", `The recording was cut: ${call.recorded.cut}`, { kind: "busy" });
  }
  element("share").hidden = call.recorded?.payloads === false;
  element("download").href = new URL("call.zip", base);
  if (call.sound) loadSound().catch((error) => messages.show("sound", `The sound cannot be had: ${error.message}`));
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
  if (peaks) player.wave.peaks(peaks);
}

sound.addEventListener("error", () => messages.show("sound", "The browser cannot play the sound of this call."));

// --- the selected turn

function showTurn(turn, place) {
  element("turn-title").textContent = `Turn ${place + 1} of ${transcript.turns.length}`;
  const facts = [
    ["request", turn.request_id],
    ["ended by", turn.finish_reason],
    ["thrown away", turn.discarded_ms && duration(turn.discarded_ms)],
    ["tokens", turn.usage && `${turn.usage.input_tokens} in, ${turn.usage.output_tokens} out`],
  ];
  element("turn-facts").replaceChildren(
    ...facts.filter(([, value]) => value).flatMap(([name, value]) => [make("dt", "", name), make("dd", "", String(value))]),
  );
  element("turn-fall").replaceChildren(turnFall(turn.spans ?? []));
  fork.select({ place, turn });
}

element("turn-frames").onclick = () => {
  showPane("frames");
  frames.reveal(beginOf(player.turn));
};

bindPanes();

// --- links

function goToHash() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  if (wanted.has("turn")) {
    const name = wanted.get("turn");
    const byId = transcript.turns.findIndex(({ request_id: id, turn_id: other }) => id === name || other === name);
    const place = byId >= 0 ? byId : Number(name) - 1;
    if (transcript.turns[place]) player.jump(beginOf(transcript.turns[place]), place);
  } else if (wanted.has("t")) {
    const ms = Number(wanted.get("t")) * 1000;
    if (ms >= 0) player.jump(ms);
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
element("copy-link").onclick = () => copyLink(`t=${(player.nowMs / 1000).toFixed(1)}`);

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

element("share").onclick = async () => {
  messages.show("share", "The page to share is being made.", { kind: "busy" });
  try {
    await shareCall(call, base);
    messages.hide("share");
  } catch (error) {
    messages.show("share", `The page could not be made: ${error.message}`);
  }
};
