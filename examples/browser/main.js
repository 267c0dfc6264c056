/* The page: joins the microphone, the session, the speaker and what is shown of them. */

import { VoiceClient } from "../client.js";
import { Orb } from "../widget/orb.js";
import { Attachments } from "./attachments.js";
import { Coming } from "./coming.js";
import { bindKeyboard, bindTalkButton } from "./controls.js";
import { ConversationView } from "./conversation-view.js";
import { Developer } from "./developer.js";
import { watchMicrophones } from "./devices.js";
import { Figures } from "./figures.js";
import { InputMeter } from "./input-meter.js";
import { LiveView } from "./live-view.js";
import { openAsAsked } from "./opening.js";
import { announce, bindDialog, element, Messages } from "./page.js";
import * as plainWords from "./plain-words.js";
import { download, soundOf, textOf, transcriptOf, wavFile } from "./recording.js";
import { offerPhone } from "./phone.js";
import { Replay } from "./replay.js";
import { currentKey, loadSettings, saveSettings, sessionConfig, setKey } from "./settings.js";
import { SettingsDrawer } from "./settings-drawer.js";
import { bandsOf } from "../widget/spectrum.js";
import { showTheme } from "./theme.js";
import { ThinkingSound } from "./thinking-sound.js";
import { shareConversation } from "./share.js";
import { chosenTools } from "./tools.js";
import { VoicePreview } from "./voice-preview.js";
import { showSuggestions } from "./welcome.js";
import { isHere, seen, waitedFor } from "./who.js";

const NEXT_DOWNLOAD_MS = 500;
/* How long it is said that an answer was interrupted, if nothing else happens. */
const INTERRUPTED_MS = 1200;
/* A lowered voice is not put into words before it has lasted so long: most are for "mm-hm". */
const DUCKED_MS = 1200;
const STARTING = "The server is starting.";
const NO_SOUND = "SoundUnavailable";
/* A wait that nobody is told of. */
const BRIEF_SEC = 0.3;

const settings = loadSettings();
const messages = new Messages(element("messages"));
const calls = settings.connection === "webrtc";
const Client = calls ? (await import("../client/call.js")).VoiceCall : VoiceClient;
const client = new Client({
  url: document.baseURI,
  key: currentKey,
  mode: settings.mode,
  config: (capabilities) => ({ ...sessionConfig(settings, capabilities), ...greetingFor(capabilities) }),
  tools: chosenTools(settings),
});
const { session, conversation, sound, microphone, speaker, talk } = client;
const live = new LiveView(element("live"), conversation);
const view = new ConversationView(element("log"), {
  copy: (text) => copy(text, "The answer was copied."),
  retry: (turn) => askAgain(turn, turn.user.text),
  replay: (turn, side) => replay.play(turn, side),
  edit: (turn) => {
    edited = turn;
    element("text").value = turn.user.text;
    element("text").focus();
    messages.show("edit", "Change the question and send it: what came after it is forgotten.", {
      kind: "plain",
      label: "Leave it",
      action: leaveEdit,
    });
  },
});
let interruptedAt = -Infinity; // performance.now() of when an answer was cut short
let edited = null; // the turn whose question is being changed
const orb = new Orb(element("orb"));
orb.watch();
const figures = new Figures();
const meter = new InputMeter(element("input-level"), element("settings"), client);
const replay = new Replay(client, { quiet: keepQuiet });
const drawer = new SettingsDrawer(settings, { changed: applySettings, opened: () => hears() && meter.listen() });
const preview = new VoicePreview([element("preview"), element("hear-voice")], new URL("v1/audio/speech", document.baseURI), {
  choice: () => {
    const { voices = [], voice_languages: languages = {} } = client.capabilities ?? {};
    const voice = voices.includes(settings.voice) ? settings.voice : voices[0];
    return { voice, language: languages[voice] };
  },
  quiet: keepQuiet,
  speaker: () => settings.speaker,
  complain: (error) => messages.show("server", plainWords.ofServer(error), { seconds: 8 }),
});
element("settings").addEventListener("close", () => preview.stop());
const developer = new Developer(client, { hasKey: () => currentKey() !== "", copy });
bindDialog(element("who-dialog"), { opener: element("open-who"), closer: element("close-who") });
bindDialog(element("save-dialog"), { opener: element("save"), closer: element("close-save") });
const attachments = new Attachments({
  place: element("pictures"),
  video: element("camera-view"),
  cameraButton: element("camera"),
  screenButton: element("screen"),
  imageButton: element("image"),
  imageInput: element("image-file"),
  dropArea: document.body,
  send: (modality, payload) => client.show(modality, payload),
  complain: (text) => messages.show("picture", text, { seconds: 8 }),
});

const coming = new Coming(document.baseURI, (error) => messages.show("server", plainWords.ofServer(error), { seconds: 8 }));

let models = [];
let created = {}; // what the server said of itself
let opened = false;

// --- the session

session.addEventListener("state", ({ detail }) => {
  if (detail.state !== "open") figures.offline();
  if (detail.state === "open") {
    messages.hide("connection");
    messages.hide("key");
    element("key-dialog").close();
  } else if (detail.state === "waiting" && detail.again && detail.seconds < BRIEF_SEC && !detail.notice?.error) {
    // Another server usually has the session by then.
  } else if (detail.state === "waiting") {
    const lost = detail.again ? "The connection was lost." : "The server does not answer.";
    const said = detail.notice?.error ? plainWords.ofServer(detail.notice.error) : lost;
    const text = `${session.starting ? STARTING : said} Trying again${calls ? "." : "; what you say until then is kept."}`;
    messages.show("connection", text, { kind: "busy", label: "Try now", action: () => session.hurry() });
  } else if (detail.state === "refused") {
    keyIsNeeded(detail.reason);
  } else if (detail.reason === "no_webrtc") {
    settings.connection = "websocket"; // this server takes no calls
    applySettings(["connection"]);
  } else if (detail.state === "ended") {
    const text = {
      deleted: "This conversation was deleted.",
      replaced: "This conversation goes on in another window.",
      session_timeout: "The server closed the conversation, because nothing happened for long.",
    }[detail.reason];
    messages.show("connection", text, { kind: "plain", label: "Begin anew here", action: () => session.open() });
  }
});

session.addEventListener("created", async ({ detail }) => {
  if (detail.lost && conversation.turns.some(({ dropped }) => !dropped)) {
    messages.show("new", "A new session began: the server does not remember what was said before.", { kind: "plain" });
  }
  showRecorded(detail);
  offerPhone().catch(() => {}); // the next session asks again
  await showServer(detail);
  if (opened) return;
  opened = true;
  const listens = hears() && talk.mode === "open" && talk.phase === "off";
  openAsAsked({ messages, listens, press: () => hands.press(performance.now()), write: () => element("text").focus() });
});

/* Who talks is told of a recording; a person at the server's own machine may hear it. */
function showRecorded({ recorded, session_id: id }) {
  const chip = element("recorded");
  chip.hidden = !recorded;
  if (recorded && isHere(location.hostname) && currentKey() === "") chip.href = `calls/${encodeURIComponent(id)}`;
  else chip.removeAttribute("href");
}

/* What the server says of itself, at the beginning and whenever another engine answers. */
async function showServer(detail) {
  attachments.allow(seen(detail));
  created = detail;
  view.transcripts = live.transcripts = detail.capabilities.transcripts;
  showSuggestions(element("suggestions"), detail, { ask: write, press: (id) => element(id).click() });
  figures.server(detail, calls ? "WebRTC" : "WebSocket");
  coming.look();
  models = await servedModels();
  drawer.offer(detail.capabilities, { models, speakerChoice: sound.canChooseOutput, calls });
}

session.addEventListener("resumed", () => {
  messages.show("new", "Connected again. Nothing was lost.", { kind: "plain", seconds: 5 });
});

session.addEventListener("rtt", ({ detail }) => figures.network(detail));

session.addEventListener("frame", ({ detail: frame }) => {
  if (frame.type === "session_updated" && frame.capabilities) {
    const { parts, advice, capabilities } = frame;
    showServer({ ...created, parts, advice, capabilities });
  }
  if (frame.resumable === false && frame.type === "session_updated") {
    messages.show("store", "If the server fails now, this conversation is lost.", { kind: "plain" });
  } else if (frame.resumable) messages.hide("store");
  if (frame.type === "session_closing" && frame.reason === "shutting_down" && !frame.resume) {
    messages.show("connection", "The server is going to restart.", { kind: "busy" });
  }
});

client.addEventListener("error", ({ detail: { error, cause } }) => {
  if (!cause) return messages.show("server", plainWords.ofServer(error), { seconds: 12 });
  messages.show(cause.name === NO_SOUND ? "sound" : "microphone", plainWords.ofMicrophone(cause));
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
  const text = `This server asks for a key.${calls ? "" : " What you write until then is kept."}`;
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

client.addEventListener("turnstart", ({ detail: { turn } }) => (turn.user.images = attachments.beginTurn()));
client.addEventListener("turnend", () => attachments.endTurn());

client.addEventListener("answered", ({ detail: { turn } }) => {
  if (settings.answerWith === "text") announce(turn.answer.text);
});

async function write(text) {
  wantSession();
  await attachments.look();
  if (!edited) return client.write(text);
  const turn = edited;
  leaveEdit();
  return askAgain(turn, text);
}

async function askAgain(turn, text) {
  wantSession();
  if (await client.resend(turn, text)) return;
  messages.show("server", "The server could not forget the earlier question; it was asked again behind it.", { seconds: 8 });
}

function leaveEdit() {
  if (edited) element("text").value = "";
  edited = null;
  messages.hide("edit");
}

async function copy(text, done) {
  try {
    await navigator.clipboard.writeText(text);
    messages.show("copied", done, { kind: "plain", seconds: 3 });
  } catch {
    messages.show("copied", "The browser does not let this page copy.", { seconds: 6 });
  }
}

element("new").onclick = () => {
  leaveEdit();
  begins = false;
  client.startAnew();
};

// --- the speaker

client.addEventListener("firstsound", ({ detail: { ms } }) => figures.firstSound(ms));
speaker.addEventListener("level", ({ detail }) => {
  const turn = speaker.playing ? conversation.turns[detail.id] : null;
  orb.add("server", detail.peak, turn && spectrumOf(turn, speaker.playedMs));
  showSpoken(turn, speaker.playedMs);
  figures.playing(detail);
});

function showSpoken(turn, ms) {
  view.speak(element("history").hidden ? null : turn, ms);
  live.speak(turn, ms);
}

/* Of the sound of an answer that is heard now; null where it is not kept. */
const SPECTRUM_MS = 32;
function spectrumOf({ sound: { server } }, ms) {
  const [from, to] = [ms - SPECTRUM_MS, ms].map((at) => Math.max(0, Math.round((at / 1000) * sound.rate)));
  let place = 0;
  for (const piece of server) {
    if (from < place + piece.length) return bandsOf(piece.subarray(Math.max(0, from - place), Math.max(0, to - place)), sound.rate);
    place += piece.length;
  }
  return null;
}
speaker.addEventListener("flushed", () => {
  orb.interrupt();
  interruptedAt = performance.now();
  showState();
  setTimeout(showState, INTERRUPTED_MS);
});
for (const end of ["ended", "flushed"]) speaker.addEventListener(end, () => showSpoken(null));
client.addEventListener("locked", showLocked);
const thinkingSound = new ThinkingSound(client, { wanted: () => settings.thinkingSound && settings.answerWith === "voice" });
sound.addEventListener("change", () => {
  sound.chooseOutput(settings.speaker).catch(() => {});
  messages.hide("sound");
  if (!sound.locked) messages.hide("locked");
});

function showLocked() {
  const text = "The browser keeps this page silent until you touch it.";
  messages.show("locked", text, { kind: "plain", label: "Let it sound", action: () => sound.wake() });
}

// --- the microphone

/* A quiet room is not worth a spectrum. */
const QUIET_PEAK = 0.004;
let heard = null; // the samples of the moment
microphone.addEventListener("chunk", ({ detail: { samples } }) => (heard = samples));
talk.addEventListener("level", ({ detail: { peak } }) => {
  orb.add("you", peak, peak > QUIET_PEAK && heard ? bandsOf(heard, sound.rate) : null);
});
talk.addEventListener("change", () => {
  if (talk.phase !== "opening") messages.hide("microphone");
  if (talk.phase !== "off") messages.hide("listen");
  if (!talk.opening) messages.hide("silent");
  if (talk.phase === "listening") {
    keepAwake();
    microphones.then((look) => look?.());
  } else letSleep();
  tellEcho();
});
talk.addEventListener("silent", () => {
  messages.show("silent", "Nothing comes out of the microphone. Say something, or look whether it is switched off.");
});
talk.addEventListener("network", ({ detail: { state } }) => {
  if (state === "well") return messages.hide("network");
  const text = {
    slow: "The network is slow: what you say arrives late.",
    paused: "The network does not keep up: what you say now is not sent.",
  }[state];
  messages.show("network", text, { kind: "busy" });
});

const microphones = watchMicrophones(({ deviceId, label }) => {
  messages.show("device", `A microphone was plugged in: ${label}.`, {
    kind: "plain",
    label: "Use it",
    seconds: 15,
    action: () => {
      messages.hide("device");
      settings.microphone = deviceId;
      drawer.listDevices();
      applySettings(["microphone"]);
    },
  });
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

/* Nobody answers, and nobody is heard, while a voice is tried out. */
let mutedHere = false;
function keepQuiet(quiet) {
  if (quiet) client.interrupt();
  if (quiet && (talk.muted || talk.mode !== "open")) return;
  if (quiet || mutedHere) talk.mute(quiet);
  mutedHere = quiet;
}

let wakeLock = null;
let asksLock = false;
let staysAwake = false;
async function keepAwake() {
  staysAwake = true;
  if (asksLock || (wakeLock && !wakeLock.released)) return; // the browser takes it back from a page that is not seen
  asksLock = true;
  wakeLock = (await navigator.wakeLock?.request("screen").catch(() => null)) ?? null;
  asksLock = false;
  if (!staysAwake) letSleep();
}
function letSleep() {
  staysAwake = false;
  wakeLock?.release();
  wakeLock = null;
}

// --- settings

function applySettings(names) {
  saveSettings(settings);
  if (names.includes("connection")) return location.reload();
  if (names.includes("theme")) showTheme(settings.theme);
  const { microphone: deviceId, echoCancellation, noiseSuppression, autoGainControl } = settings;
  talk.devices = { deviceId, echoCancellation, noiseSuppression, autoGainControl };
  if (names.some((name) => name in talk.devices || name === "microphone")) talk.reopen();
  if (names.includes("speaker")) {
    sound.chooseOutput(settings.speaker).catch(() => {
      messages.show("speaker", "This speaker cannot be used; the system's own is.", { seconds: 8 });
    });
  }
  thinkingSound.look();
  client.wantedMode = settings.mode;
  client.tools = chosenTools(settings);
  client.configure();
}

for (const radio of document.querySelectorAll("input[name=mode]")) {
  radio.addEventListener("change", () => {
    settings.mode = radio.value;
    applySettings(["mode"]);
  });
}

// --- what is shown

client.addEventListener("turn", ({ detail: { turn } }) => {
  view.show(turn);
  live.show();
  const empty = !conversation.turns.some(({ dropped }) => !dropped);
  element("welcome").hidden = !empty;
  element("live").hidden = empty;
  element("nothing-said").hidden = !empty;
  element("save").disabled = element("new").disabled = empty;
});

function showLog(open) {
  element("history").hidden = !open;
  live.whole = !open;
  live.show();
  document.body.toggleAttribute("data-log", open);
  element("open-log").setAttribute("aria-pressed", String(open));
}

function toggleLog() {
  settings.log = !settings.log;
  saveSettings(settings);
  showLog(settings.log);
}
element("open-log").onclick = toggleLog;
showLog(settings.log);

/* What the server says of itself before anybody has asked: once, when somebody begins to talk. It is written for the voice
   that speaks it. */
let begins = false;
function greetingFor({ tasks, output_modalities: gives, voices, voice_languages: languages = {} }) {
  const fresh = !conversation.turns.some(({ dropped }) => !dropped);
  if (!begins || !fresh || calls || !settings.greeting || settings.answerWith === "text") return {};
  if (!gives.includes("audio") || !tasks.includes("speech") || settings.task !== "chat") return {};
  const voice = voices.includes(settings.voice) ? settings.voice : voices[0];
  return { greeting: plainWords.greeting(languages[voice]) };
}

function greet() {
  if (begins || talk.mode !== "open") return;
  begins = true;
  sound.wake().then(() => client.configure(), () => {});
}

/* What the page calls a state of the client, and the words for it. */
const STATES = {
  connecting: ["away", "Connecting"],
  waiting: ["away", "Reconnecting"],
  refused: ["away", "A key is needed"],
  ended: ["away", "Closed"],
  starting: ["busy", "Starting"],
  opening: ["opening", "Opening the microphone"],
  hearing: ["hearing", "Hearing you"],
  speaking: ["speaking", "Speaking"],
  ducked: ["ducked", "Speaking"],
  thinking: ["busy", "Thinking"],
  listening: ["listening", "Listening"],
  muted: ["muted", "Muted"],
  ready: ["ready", "Ready"],
};

client.addEventListener("change", showState);

/* An answer that does not begin for a while: what it waits for is said. */
const SLOW_MS = 4000;
let slow = null;
function watchSlowness() {
  const waits = client.state === "thinking" && !conversation.current?.answer.text;
  if (!waits) {
    clearTimeout(slow);
    slow = null;
    messages.hide("slow");
  } else if (slow === null) {
    slow = setTimeout(() => {
      const { user } = conversation.current ?? {};
      messages.show("slow", waitedFor(created, Boolean(user?.text)), { kind: "busy" });
    }, SLOW_MS);
  }
}
client.addEventListener("change", watchSlowness);
client.addEventListener("turn", watchSlowness);

/* Whether the server takes speech; it is not offered where it does not. */
function hears() {
  return client.capabilities?.input_modalities.includes("audio") ?? true;
}

let ducking = null;
let staysDucked = false;
function watchDucking(ducked) {
  if (ducked) {
    ducking ??= setTimeout(() => {
      staysDucked = true;
      showState();
    }, DUCKED_MS);
    return;
  }
  clearTimeout(ducking);
  ducking = null;
  staysDucked = false;
}

/* Said to screen readers: what somebody's own hand has changed, once it holds. Who speaks is heard anyway, and what a screen
   reader said of it would be talked over, and be heard by the microphone. */
let told = "";
function tellHand() {
  const { phase, muted, opening } = talk;
  const words = phase === "listening" && !opening ? (muted ? "Muted" : "Listening") : phase === "off" && session.ready ? "Ready" : told;
  if (words !== told) announce(words);
  told = words;
}

function showState() {
  const canOpen = client.capabilities?.turn_detection ?? false;
  const state = STATES[client.state][0];
  watchDucking(state === "ducked");
  const said = staysDucked ? "Speaking quietly" : STATES[client.state][1];
  const trying = client.state === "connecting" || client.state === "waiting";
  const interrupted = (state === "ready" || state === "listening") && performance.now() - interruptedAt < INTERRUPTED_MS;
  const words = trying ? STATES[client.capabilities ? "waiting" : "connecting"][1] : interrupted ? "Interrupted" : said;
  if (document.body.dataset.state !== state) document.body.dataset.state = state;
  document.body.toggleAttribute("data-interrupted", words === "Interrupted");
  orb.show(state);
  setText("status", words);
  tellHand();
  const open = talk.mode === "open";
  const active = talk.phase !== "off";
  const label = open ? (active ? "Stop listening" : "Start talking") : active ? "Send" : "Hold to talk";
  element("talk").setAttribute("aria-pressed", String(active));
  element("talk").setAttribute("aria-label", open || active ? label : "Talk: hold, or press once to begin and once to send");
  setText("talk-label", label);
  element("stop").disabled = !speaker.playing && !conversation.current;
  element("talk").querySelector("use").setAttribute("href", open && active ? "#i-close" : "#i-microphone");
  for (const id of ["talk", "mute", "modes", "keys-of-talk"]) element(id).hidden = !hears();
  element("no-ears").hidden = hears();
  element("text").placeholder = hears() ? "Or write" : "Write";
  const speak = talk.opening ? "One moment." : "Say something.";
  const invitation = active ? speak : "Press the button and speak.";
  setText("invitation", hears() ? invitation : "Write something.");
  element("mute").disabled = !canMute();
  element("mute").setAttribute("aria-pressed", String(talk.muted));
  element("mode-open").disabled = !canOpen;
  element("mode-open").parentElement.title = canOpen ? "" : "This server does not detect turns";
  element(`mode-${talk.mode}`).checked = true;
}

/* Each piece of an answer changes something, and rarely any of these. */
function setText(id, text) {
  if (element(id).textContent !== text) element(id).textContent = text;
}

/* Only an open microphone can be muted. */
function canMute() {
  return talk.mode === "open" && talk.phase !== "off";
}

// --- hands

const hands = {
  press(at) {
    if (!hears()) return;
    wantSession();
    if (session.state === "refused") return; // the question for the key lies over it all
    greet();
    talk.press(at);
  },
  release: (at) => talk.release(at),
};

bindTalkButton(element("talk"), hands);
bindKeyboard({
  talk: hands,
  stop: () => {
    if (element("stop").disabled) developer.close(); // nothing else is there to be ended
    client.interrupt();
  },
  mute: () => canMute() && talk.mute(!talk.muted),
  write: () => element("text").focus(),
  log: toggleLog,
});

element("stop").onclick = () => client.interrupt();
element("mute").onclick = () => talk.mute(!talk.muted);
element("write").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = element("text").value.trim();
  if (!text) return;
  element("text").value = "";
  write(text);
});
element("save-text").onclick = () => save({ text: true });
element("save-sound").onclick = () => save({ recording: true });
element("save-all").onclick = () => save({ everything: true, recording: true });
element("save-page").onclick = async () => {
  element("save-dialog").close();
  messages.show("save", "The page to share is being made.", { kind: "busy" });
  try {
    await shareConversation(conversation.turns.filter((turn) => !turn.dropped), sound.rate, settings.voice || client.capabilities?.voices[0]);
    messages.hide("save");
  } catch (error) {
    messages.show("save", `The page could not be made: ${error.message}`);
  }
};

function save({ text = false, everything = false, recording = false }) {
  element("save-dialog").close();
  const stamp = new Date().toISOString().slice(0, 19).replaceAll(":", "-");
  const turns = conversation.turns.filter((turn) => !turn.dropped);
  if (text) download(textOf(turns), `conversation-${stamp}.txt`);
  if (everything) download(transcriptOf(turns, figures.told), `conversation-${stamp}.json`);
  const pieces = !recording || sound.rate === null ? [] : soundOf(turns, sound.rate);
  // Safari drops a download that another one follows at once.
  const next = () => download(wavFile(pieces, sound.rate), `conversation-${stamp}.wav`);
  if (pieces.length) setTimeout(next, everything ? NEXT_DOWNLOAD_MS : 0);
  else if (recording && !everything) messages.show("save", "There is no sound to save.", { seconds: 5 });
}

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
client.open();
