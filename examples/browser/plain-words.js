/* What went wrong, as one would say it, and what can be done about it; how long something took; names of voices. */

import { isHere } from "./who.js";

const MICROPHONE = {
  NotAllowedError:
    "The browser does not let this page use the microphone. Allow it beside the address of the page and try again. " +
    "Until then you can write.",
  NotFoundError: "No microphone was found. Plug one in and try again, or write.",
  NotReadableError: "The microphone could not be opened: another program may be using it.",
  LostError: "The microphone went away. Plug it in again, or choose another one in the settings.",
  SoundLocked:
    "The browser does not start the sound, so it does not record either. Try again; if that does not help, look whether " +
    "the machine has a loudspeaker or headphones. Until then you can write.",
  SoundUnavailable: "What the page needs for sound cannot be had from the server. Try again when the connection is back.",
  InsecureContext:
    "Browsers give the microphone only to pages that come over https, or from this very machine. " +
    "Open this page over https (docs/browser.md tells how), or write.",
};

const FAILED = "engine_failed";
const OF_OTHERS = ["engine_overloaded", "upstream_invalid", "model_not_found"];

const SERVER = {
  engine_overloaded: "The server is busy. Try again in a moment.",
  rate_limited: "Too many requests or sessions with this key at once. Try again in a moment.",
  shutting_down: "The server is being shut down.",
  engine_failed: "The server could not work this out. Its log has the reason.",
  upstream_invalid: "What the model's server answered could not be understood.",
  empty_input: "Nothing was heard.",
  context_length_exceeded: "The conversation has become too long for the model. Begin a new one.",
  payload_too_large: "That was too much at once.",
  model_not_found: "The server does not have this model.",
  slow_consumer: "The network was too slow for what the server had to say.",
  too_much_sound: "The server sends faster than anybody can listen: this answer is not played to its end.",
  undeliverable: "This could not be sent: the connection broke each time. Please say it again.",
  unreachable: "No packets get through by WebRTC. Choose the WebSocket in the settings.",
  unsupported_modality: "The server cannot take this kind of input.",
  unsupported_format: "The server cannot read this format.",
};

/* A voice with its language (RFC 5646), where that is known and its name does not say it: "Heart (American English)". */
export function voiceName(voice, language) {
  const name = voice && voice[0].toUpperCase() + voice.slice(1);
  const spoken = language && languageName(language);
  return !spoken || name.toLowerCase().includes(spoken.toLowerCase()) ? name : `${name} (${spoken})`;
}

/* The English name of a language (RFC 5646). */
export function languageName(language) {
  try {
    return new Intl.DisplayNames(["en"], { type: "language" }).of(language);
  } catch {
    return language; // not one of RFC 5646, whatever the server says
  }
}

export function ofMicrophone(error) {
  return MICROPHONE[error.name] ?? `The microphone could not be opened: ${error.message || error.name}.`;
}

export function ofServer({ code, message, param }) {
  if (code === FAILED && message && isHere(location.hostname)) return ofAnswer(code, message);
  if (code === "unsupported_parameter") return `The server cannot do that: ${message}${param ? ` (${param})` : ""}.`;
  return SERVER[code] ?? (message ? `The server says: ${message}` : code);
}

/* An answer's error is kept by its code, with the server's `reason`: it says more where another server was asked, and
   whoever reads it on the server's own machine can do something about a failure. */
export function ofAnswer(code, reason) {
  const said = SERVER[code] ?? code;
  if (!reason) return said;
  if (code === FAILED) return isHere(location.hostname) ? `The server could not work this out: ${reason}` : said;
  return OF_OTHERS.includes(code) ? `${said} It says: ${reason}` : said;
}

/* What is said first, in the language of a voice (RFC 5646), where there are words in it here. */
const GREETINGS = {
  de: "Hallo. Was kann ich für Sie tun?",
  en: "Hello. What can I do for you?",
  es: "Hola. ¿En qué puedo ayudarle?",
  fr: "Bonjour. Que puis-je faire pour vous ?",
  it: "Buongiorno. Che cosa posso fare per lei?",
  nl: "Hallo. Wat kan ik voor u doen?",
  pl: "Dzień dobry. W czym mogę pomóc?",
  pt: "Olá. O que posso fazer por você?",
};

export function greeting(language = "en") {
  return GREETINGS[language.split("-")[0]] ?? GREETINGS.en;
}
