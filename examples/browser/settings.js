/* What the person chose, remembered in this browser, and what of it goes to the server. */

import { settingOf, TOOLS } from "./tools.js";

const STORE = "omni_ws.settings";
const KEY_STORE = "omni_ws.key";

export const DEFAULTS = {
  mode: "open",
  theme: "system",
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
  startPolicy: "",
  instructions: "",
  sensitivity: 50, // percent
  turns: "auto",
  silenceMs: 500,
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
  const common = { threshold: 1 - settings.sensitivity / 100, interrupt_response: true, interrupt_resume: true };
  if (!judgesTurns(capabilities) || settings.turns === "silence") {
    return { type: "server_vad", silence_duration_ms: settings.silenceMs, ...common };
  }
  // How long the silence may last follows from the eagerness.
  return { type: "semantic_vad", eagerness: settings.turns, silence_duration_ms: null, ...common };
}

/* What of the session_config is set here. Null takes a field back to the server's default. */
export function sessionConfig(settings, capabilities) {
  const speaks = capabilities.output_modalities.includes("audio");
  const detects = settings.mode === "open" && capabilities.turn_detection;
  return {
    model: settings.model || null,
    voice: capabilities.voices.includes(settings.voice) ? settings.voice : null,
    input_audio: { language: capabilities.languages?.includes(settings.language) ? settings.language : null },
    task: capabilities.tasks.includes(settings.task) ? settings.task : "chat",
    modalities: settings.answerWith === "text" && speaks ? ["text"] : null,
    instructions: settings.instructions || null,
    start_policy: settings.startPolicy || null,
    turn_detection: detects ? turnDetection(settings, capabilities) : null,
  };
}
