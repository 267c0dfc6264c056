/* The page: joins the microphone, the session, the speaker and what is shown of them. */

import { Attachments } from "./attachments.js";
import { bindKeyboard, bindTalkButton } from "./controls.js";
import { Conversation, isOwed } from "./conversation.js";
import { ConversationView } from "./conversation-view.js";
import { Figures } from "./figures.js";
import { Microphone } from "./microphone.js";
import { announce, element, Messages } from "./page.js";
import * as plainWords from "./plain-words.js";
import { download, soundOf, transcriptOf, wavFile } from "./recording.js";
import { Session } from "./session.js";
import { currentKey, loadSettings, saveSettings, sessionConfig, setKey } from "./settings.js";
import { SettingsDrawer } from "./settings-drawer.js";
import { Sound } from "./sound.js";
import { Speaker } from "./speaker.js";
import { Talk } from "./talk.js";
import { runTool } from "./tools.js";
import { WaveView } from "./wave-view.js";

const ACKNOWLEDGE_MS = 250;
const NEXT_DOWNLOAD_MS = 500;
/* A model that calls tools without end gets no more results after so many. */
const MAX_TOOL_TURNS = 5;
const STARTING = "The server is starting.";

const settings = loadSettings();
const messages = new Messages(element("messages"));
const sound = new Sound();
const microphone = new Microphone();
const speaker = new Speaker(sound);
const conversation = new Conversation();
const session = new Session(document.baseURI, currentKey);
const talk = new Talk({ sound, microphone, session, conversation });
const view = new ConversationView(element("log"), element("welcome"));
const wave = new WaveView(element("wave"));
const figures = new Figures();
const drawer = new SettingsDrawer(settings, { changed: applySettings });
const attachments = new Attachments({
  place: element("pictures"),
  video: element("camera-view"),
  cameraButton: element("camera"),
  imageButton: element("image"),
  imageInput: element("image-file"),
  dropArea: document.body,
  send: (modality, payload) => session.sendChunk({ modality, payload, turn: pageTurn }),
  complain: (text) => messages.show("picture", text, { seconds: 8 }),
});

let openSince = Infinity; // performance.now() of when the connection was made
let capabilities = null;
let models = [];
let lastSpeechMs = -1;
let heardTurn = null; // what the server hears someone say, with an open microphone
let pageTurn = null; // the number of the turn that the page itself began, while it is being said

// --- the session

session.addEventListener("state", ({ detail }) => {
  if (detail.state === "open") {
    openSince = performance.now();
    if (sound.context) sound.wake().catch(() => {}); // it could not be loaded while the server was away
    messages.hide("connection");
    messages.hide("key");
    element("key-dialog").close();
  } else if (detail.state === "waiting") {
    const lost = detail.again ? "The connection was lost." : "The server does not answer.";
    const said = detail.notice?.error ? plainWords.ofServer(detail.notice.error) : lost;
    const text = `${session.starting ? STARTING : said} Trying again; what you say until then is kept.`;
    messages.show("connection", text, { kind: "busy", label: "Try now", action: () => session.hurry() });
  } else if (detail.state === "refused") {
    keyIsNeeded(detail.reason);
  } else if (detail.state === "ended") {
    const text = {
      replaced: "This conversation goes on in another window.",
      session_timeout: "The server closed the conversation, because nothing happened for long.",
    }[detail.reason];
    messages.show("connection", text, { kind: "plain", label: "Begin anew here", action: () => session.open() });
  }
  showState();
});

session.addEventListener("created", async ({ detail }) => {
  capabilities = detail.capabilities;
  speaker.flush();
  talk.forgetPlaces();
  heardTurn = null;
  lastSpeechMs = -1;
  attachments.endTurn();
  conversation.lose(detail.resent);
  if (detail.lost) {
    messages.show("new", "A new session began: the server does not remember what was said before.", { kind: "plain" });
  }
  attachments.allow(capabilities.input_modalities);
  figures.server(detail);
  setMode();
  session.configure(sessionConfig(settings, capabilities, sound.rate));
  models = await servedModels();
  drawer.offer(capabilities, { models, speakerChoice: sound.canChooseOutput });
});

session.addEventListener("resumed", () => {
  // What was stopped meanwhile could not be said.
  for (const { unwanted, requestId, answer } of conversation.turns) {
    if (unwanted && requestId && answer.finishReason === null) session.cancel(requestId);
  }
  messages.show("new", "Connected again. Nothing was lost.", { kind: "plain", seconds: 5 });
});

session.addEventListener("rtt", ({ detail }) => figures.network(detail));

session.addEventListener("frame", ({ detail: frame }) => {
  if (frame.type === "speech_started") return speechStarted(frame);
  if (frame.type === "speech_stopped") return speechStopped(frame);
  if (frame.type === "error" && !frame.error.request_id) {
    return messages.show("server", plainWords.ofServer(frame.error), { seconds: 12 });
  }
  if (frame.type === "session_closing" && frame.reason === "shutting_down") {
    return messages.show("connection", "The server is going to restart.", { kind: "busy" });
  }
  if (frame.type === "audio") frame.place = Math.round((frame.startMs / 1000) * configuredRate);
  const turn = conversation.apply(frame);
  if (!turn) return;
  if (frame.type === "audio" && !turn.unwanted) {
    conversation.keepSound(turn, "server", frame.samples.slice());
    speaker.play(turn.number, frame.samples, frame.place);
    if (sound.locked || sound.rate === null) showLocked();
  }
  if (frame.final) {
    speaker.end(turn.number);
    if (settings.answerWith === "text") announce(turn.answer.text);
    if (frame.finish_reason === "tool_calls" && !turn.unwanted) runTools(turn.answer.calls);
  }
  if (frame.final || frame.type === "audio" || turn.answer.text) session.answered(turn.number);
  showState();
});

async function servedModels() {
  const key = currentKey();
  try {
    const headers = key ? { Authorization: `Bearer ${key}` } : {};
    return (await (await fetch(session.modelsUrl, { headers })).json()).data.map(({ id }) => id);
  } catch {
    return []; // the choice is not offered
  }
}

function keyIsNeeded(reason) {
  const wrong = reason === "unsendable" ? "A browser cannot send a key with these characters." : "This key is not known here.";
  element("key-problem").textContent = currentKey() ? wrong : "";
  const text = "This server asks for a key. What you write until then is kept.";
  messages.show("key", text, { kind: "plain", label: "Enter the key", action: askForKey });
  askForKey();
}

function askForKey() {
  if (!element("key-dialog").open) element("key-dialog").showModal();
}

/* Who wants to talk wants a session, too. */
function wantSession() {
  if (session.state === "ended") session.open();
  else if (session.state === "refused") askForKey();
  else session.hurry();
}

element("close-key").onclick = () => element("key-dialog").close();
element("key-form").addEventListener("submit", (event) => {
  event.preventDefault(); // it stays until the key is found to be good
  setKey(element("key").value.trim());
  session.open();
});

// --- turns

/* With an open microphone the server says when someone begins to speak, and sends nothing more of its answer, unless
   that turns out to have no words. */
function speechStarted({ audio_ms: audioMs }) {
  if (audioMs <= lastSpeechMs) return; // a resumed connection repeats what it is not sure of
  lastSpeechMs = audioMs;
  heardTurn = conversation.begin("heard");
  conversation.hold(heardTurn);
  speaker.flush();
  heardTurn.beganAtMs = audioMs;
  heardTurn.user.images = attachments.beginTurn();
  conversation.heard(heardTurn, {});
  showState();
}

function speechStopped({ audio_ms: audioMs }) {
  if (!heardTurn || audioMs <= heardTurn.beganAtMs) return;
  attachments.endTurn();
  for (const samples of talk.samplesBetween(heardTurn.beganAtMs, audioMs)) conversation.keepSound(heardTurn, "user", samples);
  conversation.endSpeech(heardTurn, talk.spokenAt(audioMs) ?? performance.now());
  heardTurn = null;
  showState();
}

/* What is being said into an open microphone ends here, whatever follows. */
function endHeardTurn() {
  if (!heardTurn) return;
  session.sendChunk({ modality: "audio", payload: new Uint8Array(0), endOfInput: true });
  conversation.endSpeech(heardTurn, performance.now());
  heardTurn = null;
}

talk.addEventListener("turn", ({ detail: { turn } }) => {
  interrupt(turn);
  pageTurn = turn.number;
  turn.user.images = attachments.beginTurn();
  conversation.heard(turn, {});
});

/* Reply to the calls of an answer: by themselves, or, while someone speaks, as part of what is being said. */
function runTools(calls) {
  if (conversation.turns.slice(-MAX_TOOL_TURNS).filter(({ kind }) => kind === "tool").length === MAX_TOOL_TURNS) return;
  const alone = !heardTurn && talk.phase !== "talking";
  const turn = alone ? conversation.begin("tool").number : pageTurn;
  calls.forEach((call, place) => {
    const payload = new TextEncoder().encode(runTool(call));
    const endOfInput = alone && place === calls.length - 1;
    session.sendChunk({ modality: "text", payload, toolCallId: call.id, endOfInput, turn });
  });
}

/* Silence at once, here. What of the answer was heard is told to the server. */
function silence(exception = null) {
  for (const turn of conversation.turns) {
    if (turn === exception || !isOwed(turn)) continue;
    session.answered(turn.number);
    conversation.stop(turn);
  }
  speaker.flush();
}

/* Silence at once, here and there. */
function interrupt(exception = null) {
  const owed = conversation.turns.some((turn) => turn !== exception && isOwed(turn));
  if (speaker.playing) session.acknowledge(speaker.playedMs);
  // Also where all of it has come and is being played: the server keeps in mind what was heard of it.
  if (owed || speaker.playing) session.cancel();
  silence(exception);
  showState();
}

async function write(text) {
  wantSession();
  await sound.wake().catch(() => {}); // an answer that is not heard can still be read
  // What is written does not join what is being said: that is at its end, and this takes its place.
  if (talk.phase === "talking") talk.stop();
  endHeardTurn();
  interrupt();
  const turn = conversation.begin("written", { text });
  pageTurn = turn.number;
  turn.user.images = attachments.beginTurn();
  attachments.endTurn();
  const payload = new TextEncoder().encode(text);
  turn.speechEndedAt = performance.now();
  if (!session.sendChunk({ modality: "text", payload, endOfInput: true, turn: turn.number })) {
    conversation.fail(turn, "Too much waits to be sent. Wait until the connection is back.");
  }
  pageTurn = null;
  conversation.heard(turn, {});
  showState();
}

// --- the speaker

speaker.addEventListener("started", ({ detail: { id, heardAt } }) => {
  const turn = conversation.turns[id];
  const firstSoundMs = heardAt - turn.speechEndedAt;
  // A turn that waited for a connection says nothing about how fast the server is.
  if (turn.speechEndedAt !== null && turn.speechEndedAt >= openSince && firstSoundMs > 0 && turn.firstSoundMs === null) {
    figures.firstSound(firstSoundMs);
    conversation.heard(turn, { firstSoundMs });
  }
  showState();
});
speaker.addEventListener("ended", ({ detail: { id, playedMs } }) => {
  session.acknowledge(playedMs);
  conversation.heard(conversation.turns[id], { heardMs: playedMs });
  showState();
});
speaker.addEventListener("flushed", ({ detail: { id, playedMs } }) => {
  session.acknowledge(playedMs);
  conversation.cut(conversation.turns[id], playedMs);
  showState();
});
speaker.addEventListener("level", ({ detail }) => {
  wave.add("server", detail.peak);
  figures.playing(detail);
});
speaker.addEventListener("overflow", () => {
  messages.show("server", "The server sends faster than anybody can listen; some of it is not played.");
});
setInterval(() => session.acknowledge(speaker.playedMs), ACKNOWLEDGE_MS);

let configuredRate = null;
sound.addEventListener("change", () => {
  if (sound.rate !== configuredRate) {
    // Also while it is locked: what comes meanwhile is kept, and shall have the right rate.
    configuredRate = sound.rate;
    if (capabilities) session.configure(sessionConfig(settings, capabilities, sound.rate));
    speaker.attach(sound.context);
    sound.chooseOutput(settings.speaker).catch(() => {});
  }
  if (!sound.locked) messages.hide("locked");
  else if (speaker.playing || talk.phase === "talking" || talk.phase === "listening") showLocked();
});

function showLocked() {
  const text = "The browser keeps this page silent until you touch it.";
  messages.show("locked", text, { kind: "plain", label: "Let it sound", action: () => sound.wake() });
}

// --- the microphone

talk.addEventListener("level", ({ detail: { peak } }) => {
  wave.add("you", peak);
  element("talk").style.setProperty("--level", Math.min(1, Math.sqrt(peak)).toFixed(2));
});
talk.addEventListener("change", () => {
  if (talk.phase !== "talking" && pageTurn !== null) {
    pageTurn = null;
    attachments.endTurn();
  }
  if (talk.phase !== "opening") messages.hide("microphone");
  if (talk.phase === "listening") keepAwake();
  else letSleep();
  if (talk.phase === "off") endHeardTurn(); // closed in the middle of a sentence
  tellEcho();
  showState();
});
talk.addEventListener("problem", ({ detail: { error } }) => {
  messages.show("microphone", plainWords.ofMicrophone(error));
});
talk.addEventListener("network", ({ detail: { state } }) => {
  if (state === "well") return messages.hide("network");
  const text = {
    slow: "The network is slow: what you say arrives late.",
    paused: "The network does not keep up: what you say now is not sent.",
  }[state];
  messages.show("network", text, { kind: "busy" });
});

/* An open microphone hears the answers, too, unless they are taken out. Said once: it can be dismissed. */
let leavesEcho = false;
function tellEcho() {
  figures.echo(microphone.cancelsEcho);
  const left = talk.phase === "listening" && settings.echoCancellation && microphone.cancelsEcho === false;
  if (left === leavesEcho) return;
  leavesEcho = left;
  if (!left) return messages.hide("echo");
  const text =
    "This browser does not take the sound of the speaker out of what this microphone hears, so an answer may " +
    "interrupt itself. Use headphones, or the button.";
  messages.show("echo", text, { kind: "plain" });
}

let wakeLock = null;
async function keepAwake() {
  // The browser takes it back from a page that is not seen.
  if (!wakeLock || wakeLock.released) wakeLock = await navigator.wakeLock?.request("screen").catch(() => null);
}
function letSleep() {
  wakeLock?.release();
  wakeLock = null;
}

// --- settings

function applySettings(names) {
  saveSettings(settings);
  const { microphone: deviceId, echoCancellation, noiseSuppression, autoGainControl } = settings;
  talk.devices = { deviceId, echoCancellation, noiseSuppression, autoGainControl };
  if (names.some((name) => name in talk.devices || name === "microphone")) talk.reopen();
  if (names.includes("speaker")) {
    sound.chooseOutput(settings.speaker).catch(() => {
      messages.show("speaker", "This speaker cannot be used; the system's own is.", { seconds: 8 });
    });
  }
  if (names.includes("mode")) setMode();
  if (capabilities) session.configure(sessionConfig(settings, capabilities, sound.rate));
}

/* Where the server cannot tell who speaks, the button is the only way. */
function setMode() {
  const canOpen = capabilities?.turn_detection ?? false;
  const mode = canOpen ? settings.mode : "hold";
  if (talk.mode !== mode && talk.phase !== "off") talk.stop();
  talk.mode = mode;
  element("mode-open").disabled = !canOpen;
  element("mode-open").parentElement.title = canOpen ? "" : "This server does not detect turns";
  element(`mode-${mode}`).checked = true;
  showState();
}

for (const radio of document.querySelectorAll("input[name=mode]")) {
  radio.addEventListener("change", () => {
    settings.mode = radio.value;
    applySettings(["mode"]);
  });
}

// --- what is shown

conversation.addEventListener("change", ({ detail: { turn } }) => {
  view.show(turn);
  element("save").disabled = false;
});

function stateNow() {
  const trying = capabilities ? "Reconnecting" : "Connecting";
  const words = { connecting: trying, waiting: trying, refused: "A key is needed", ended: "Closed" };
  if (session.state !== "open" && session.starting) return ["busy", "Starting"];
  if (session.state !== "open") return ["away", words[session.state]];
  if (talk.phase === "opening") return ["busy", "Opening the microphone"];
  if (talk.phase === "talking") return ["hearing", "Hearing you"];
  if (heardTurn) return ["hearing", "Hearing you"];
  if (speaker.playing) return ["speaking", "Speaking"];
  if (conversation.current) return ["busy", "Thinking"];
  if (talk.phase === "listening") return talk.muted ? ["muted", "Muted"] : ["listening", "Listening"];
  return ["ready", "Ready"];
}

function showState() {
  const [state, words] = stateNow();
  document.body.dataset.state = state;
  if (element("status").textContent !== words) element("status").textContent = words;
  const open = talk.mode === "open";
  const active = talk.phase !== "off";
  const label = open ? (active ? "Close the microphone" : "Open the microphone") : active ? "Send" : "Hold to talk";
  element("talk").setAttribute("aria-pressed", String(active));
  element("talk").setAttribute("aria-label", open || active ? label : "Talk: hold, or press once to begin and once to send");
  element("talk-label").textContent = label;
  element("stop").disabled = !speaker.playing && !conversation.current;
  element("mute").disabled = !open;
  element("mute").setAttribute("aria-pressed", String(talk.muted));
}

// --- hands

const hands = {
  press(at) {
    wantSession();
    if (session.state === "refused") return; // the question for the key lies over it all
    talk.press(at);
  },
  release: (at) => talk.release(at),
};

bindTalkButton(element("talk"), hands);
bindKeyboard({
  talk: hands,
  stop: () => interrupt(),
  mute: () => talk.mode === "open" && talk.mute(!talk.muted),
  write: () => element("text").focus(),
});

element("stop").onclick = () => interrupt();
element("mute").onclick = () => talk.mute(!talk.muted);
element("write").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = element("text").value.trim();
  if (!text) return;
  element("text").value = "";
  write(text);
});
for (const example of document.querySelectorAll("[data-say]")) example.onclick = () => write(example.dataset.say);

element("save").onclick = () => {
  const stamp = new Date().toISOString().slice(0, 19).replaceAll(":", "-");
  download(transcriptOf(conversation.turns, figures.told), `conversation-${stamp}.json`);
  const pieces = sound.rate === null ? [] : soundOf(conversation.turns, sound.rate);
  // Safari drops a download that another one follows at once.
  const next = () => download(wavFile(pieces, sound.rate), `conversation-${stamp}.wav`);
  if (pieces.length) setTimeout(next, NEXT_DOWNLOAD_MS);
};

// What counts as a gesture: a mouse that goes down, a finger that goes up.
for (const gesture of ["pointerdown", "pointerup", "keydown"]) document.addEventListener(gesture, () => sound.revive());
document.addEventListener("visibilitychange", () => {
  if (document.hidden) {
    if (talk.mode === "hold" && talk.phase === "off") microphone.close(); // nobody is going to speak
    return;
  }
  sound.revive();
  if (talk.phase === "listening") keepAwake();
  session.check();
});
window.addEventListener("online", () => session.hurry());

setInterval(() => figures.waiting(session.unacknowledged, session.bufferedBytes), 1000);
element("save").disabled = true; // Firefox remembers over a reload what a button was
applySettings([]);
showState();
session.open();
