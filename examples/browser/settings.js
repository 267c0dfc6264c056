/* What the person chose, remembered in this browser, and what of it goes to the server. */

import { TOOLS } from "./tools.js";

const STORE = "omni_ws.settings";
const KEY_STORE = "omni_ws.key";

export const DEFAULTS = {
  mode: "open",
  microphone: "",
  speaker: "",
  echoCancellation: true,
  noiseSuppression: true,
  autoGainControl: true,
  model: "",
  voice: "",
  task: "chat",
  answerWith: "voice",
  startPolicy: "",
  instructions: "",
  threshold: 0.5,
  turns: "auto",
  silenceMs: 500,
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
  const common = { threshold: settings.threshold, interrupt_response: true, interrupt_resume: true };
  if (!judgesTurns(capabilities) || settings.turns === "silence") {
    return { type: "server_vad", silence_duration_ms: settings.silenceMs, ...common };
  }
  // How long the silence may last follows from the eagerness.
  return { type: "semantic_vad", eagerness: settings.turns, silence_duration_ms: null, ...common };
}

/* The session_config of these settings. Null takes a field back to the server's default. `rate` is null before there is
   any sound on this page. */
export function sessionConfig(settings, capabilities, rate) {
  const speaks = capabilities.output_modalities.includes("audio");
  const detects = settings.mode === "open" && capabilities.turn_detection;
  const sampleRate = rate === null ? {} : { sample_rate: Math.round(rate) };
  return {
    model: settings.model || null,
    voice: capabilities.voices.includes(settings.voice) ? settings.voice : null,
    task: capabilities.tasks.includes(settings.task) ? settings.task : "chat",
    modalities: settings.answerWith === "text" && speaks ? ["text"] : null,
    instructions: settings.instructions || null,
    tools: capabilities.tools ? TOOLS : null,
    start_policy: settings.startPolicy || null,
    overlap: "interrupt",
    turn_detection: detects ? turnDetection(settings, capabilities) : null,
    input_audio: { format: "pcm16", channels: 1, ...sampleRate },
    output_audio: { format: "pcm16", ...sampleRate },
  };
}
