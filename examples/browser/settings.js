/* What the person chose, remembered in this browser, and what of it goes to the server. */

import { settingOf, TOOLS } from "./tools.js";

const STORE = "omni_ws.settings";
const KEY_STORE = "omni_ws.key";

export const DEFAULTS = {
  mode: "open",
  theme: "system",
  log: false, // the log is open
  greeting: true, // it says hello when somebody begins to talk
  connection: "websocket",
  microphone: "",
  speaker: "",
  echoCancellation: true,
  noiseSuppression: true,
  autoGainControl: true,
  model: "",
  voice: "",
  language: "", // that of the speaker; "": the server tells it by the sound
  task: "chat",
  answerWith: "voice",
  thinkingSound: true, // while an answer is long in coming
  startPolicy: "",
  instructions: "",
  keywords: "", // a name or a term a line
  lexicon: "", // a line for each word: how it is written = how it is said
  sensitivity: 50, // percent
  turns: "auto",
  silenceMs: 500,
  overShortWords: true, // an answer goes on over "mm-hm"
  murmurs: false, // it says "mm-hm" itself
  ...Object.fromEntries(Object.keys(TOOLS).map((name) => [settingOf(name), true])),
};

export function loadSettings() {
  const settings = { ...DEFAULTS };
  try {
    const stored = JSON.parse(localStorage.getItem(STORE)) ?? {};
    for (const [name, value] of Object.entries(DEFAULTS)) {
      if (typeof stored[name] === typeof value) settings[name] = stored[name];
    }
  } catch {
    // A browser that remembers nothing, or something else: the defaults.
  }
  return settings;
}

export function saveSettings(settings) {
  try {
    localStorage.setItem(STORE, JSON.stringify(settings));
  } catch {
    // It holds for this visit.
  }
}

/* The key stays for this visit only: it is a secret, and this is a browser. */
let key = "";
try {
  key = sessionStorage.getItem(KEY_STORE) ?? "";
} catch {
  // Private windows of some browsers have no storage.
}

/* A link may bring the key, as the one of `omni-ws serve --lan` does. It stays neither in the address nor in the history. */
function takeBroughtKey() {
  const brought = new URLSearchParams(location.hash.slice(1)).get("key");
  if (brought) {
    setKey(brought);
    history.replaceState(history.state, "", location.pathname + location.search);
  }
  return Boolean(brought);
}
takeBroughtKey();
addEventListener("hashchange", () => {
  if (takeBroughtKey()) location.reload();
});

export function currentKey() {
  return key;
}

export function setKey(value) {
  key = value;
  try {
    sessionStorage.setItem(KEY_STORE, value);
  } catch {
    // It holds for this page.
  }
}

/* Whether the server can tell by the voice that somebody has finished. */
export function judgesTurns(capabilities) {
  return capabilities.turn_detection_types?.includes("semantic_vad") ?? false;
}

function turnDetection(settings, capabilities) {
  const common = {
    threshold: 1 - settings.sensitivity / 100,
    interrupt_response: true,
    interrupt_resume: true,
    duck: settings.overShortWords,
  };
  if (!judgesTurns(capabilities) || settings.turns === "silence") {
    return { type: "server_vad", silence_duration_ms: settings.silenceMs, ...common };
  }
  // How long the silence may last follows from the eagerness.
  const murmurs = capabilities.backchannel ? { backchannel: settings.murmurs } : {};
  return { type: "semantic_vad", eagerness: settings.turns, silence_duration_ms: null, ...common, ...murmurs };
}

/* The limits of the server, which refuses what has more; here the rest is left out. */
const MOST_KEYWORDS = 100;
const MOST_WORDS = 500;
const LONGEST_WORD = 64;
const LONGEST_SAID = 128;

const characters = (text) => [...text].length;
const linesOf = (text) => text.split("\n").map((line) => line.trim()).filter(Boolean);

function keywordsOf(text) {
  const words = linesOf(text).filter((line) => characters(line) <= LONGEST_WORD);
  return [...new Set(words)].slice(0, MOST_KEYWORDS);
}

function lexiconOf(text) {
  const entries = linesOf(text).map((line) => {
    const [word, ...said] = line.split("=").map((part) => part.trim());
    return [word, said.join("=")];
  });
  const fits = ([word, said]) => word && said && characters(word) <= LONGEST_WORD && characters(said) <= LONGEST_SAID;
  return Object.fromEntries(entries.filter(fits).slice(0, MOST_WORDS));
}

/* Words that the server was told in this visit. It adds new words to those, so it is told which are gone. */
const toldWords = new Set();

function lexiconPatch(text) {
  const lexicon = lexiconOf(text);
  const gone = [...toldWords].filter((word) => !Object.hasOwn(lexicon, word));
  for (const word of Object.keys(lexicon)) toldWords.add(word);
  return { ...Object.fromEntries(gone.map((word) => [word, null])), ...lexicon };
}

/* What of the session_config is set here. Null takes a field back to the server's default. */
export function sessionConfig(settings, capabilities) {
  const speaks = capabilities.output_modalities.includes("audio");
  const detects = settings.mode === "open" && capabilities.turn_detection;
  return {
    model: settings.model || null,
    voice: capabilities.voices.includes(settings.voice) ? settings.voice : null,
    input_audio: {
      language: capabilities.languages?.includes(settings.language) ? settings.language : null,
      ...(capabilities.keywords && { keywords: keywordsOf(settings.keywords) }),
    },
    task: capabilities.tasks.includes(settings.task) ? settings.task : "chat",
    modalities: settings.answerWith === "text" && speaks ? ["text"] : null,
    instructions: settings.instructions || null,
    start_policy: settings.startPolicy || null,
    ...(capabilities.lexicon && { tts: { lexicon: lexiconPatch(settings.lexicon) } }),
    turn_detection: detects ? turnDetection(settings, capabilities) : null,
  };
}
