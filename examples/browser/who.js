/* Who listens, answers and speaks: the parts of the server's engine, by names that people read. */

/* Engines whose name says less than that of their model. */
const NAMELESS = ["remote", "vllm", "talker"];

/* The names of who does each work, by its verb; null where nobody does. */
export function workers({ parts, capabilities }) {
  const { asr = null, llm = null, tts = null } = parts ?? {};
  const model = llm && llm.model;
  return {
    heard: nameOf(asr) ?? (capabilities.input_modalities.includes("audio") ? model : null),
    answered: model,
    spoken: nameOf(tts) ?? (capabilities.output_modalities.includes("audio") ? model : null),
  };
}

/* One sentence: "Heard by whisper, answered by rules, spoken by hibari." Empty where the server does not tell. */
export function sentence(created) {
  const told = [];
  for (const [verb, name] of Object.entries(workers(created))) {
    if (name === null) continue;
    if (told.at(-1)?.name === name) told.at(-1).verbs.push(verb);
    else told.push({ verbs: [verb], name });
  }
  const words = told.map(({ verbs, name }) => `${verbs.join(" and ")} by ${short(name)}`).join(", ");
  return words && `${capitalised(words)}.`;
}

/* The names alone, for the head of the page: "whisper · rules · hibari". */
export function brief(created) {
  return [...new Set(Object.values(workers(created)).filter(Boolean).map(short))].join(" · ");
}

/* A licence stands in the list of who answers, and below each answer with its source. */
function short(name) {
  return name.replace(/ \(.*\)$/, "");
}

/* Where a voice and words go, in a sentence. `host` is that of the page's address. */
export function places({ parts, capabilities }, host) {
  const here = isHere(host);
  const machine = here ? "this machine" : host;
  const takes = (...modalities) => modalities.some((one) => capabilities.input_modalities.includes(one));
  const given = new Map(); // what goes on, by the hosts that get it
  const give = (role, what) => {
    const names = (parts?.[role]?.hosts ?? []).join(" or ");
    if (names) given.set(names, [...(given.get(names) ?? []), what]);
    return names !== "";
  };
  let voiceGoesOn = give("asr", "your voice");
  if (takes("audio") && !parts?.asr) voiceGoesOn = give("llm", "your voice");
  give("llm", takes("image", "video") ? "what you say, write or show" : "what you say or write");
  give("tts", "the words of the answers");
  const goes = [...given].map(([names, things]) => `${listed(things)} ${verb(things)} to ${names}`);
  if (goes.length === 0) return here ? "What you say and write stays on this machine." : `What you say and write goes to ${host}, and stays there.`;
  if (takes("audio") && !voiceGoesOn) goes.unshift(`your voice ${here ? "stays on" : "goes to"} ${machine}`);
  else if (!here) goes.unshift(`your voice and words go to ${machine}`);
  return capitalised(`${goes.join("; ")}.`);
}

/* Whether the server is on the machine of whoever reads the page. */
export function isHere(host) {
  return /^(localhost|127\..*|\[::1\])$/.test(host);
}

/* The modalities that somebody looks at: rules take pictures, too, but can tell no more than their size and colour. */
export function seen({ parts, capabilities: { input_modalities: takes } }) {
  return parts?.llm?.name === "rules" ? [] : takes.filter((one) => one === "image" || one === "video");
}

export const NO_MODEL = "No language model answers, only rules: they know the time, sums, units and plain facts.";

/* What somebody may miss, who cannot tell by talking: ears, a voice, a mind. `host` is that of the page's address. */
export function lacking({ parts, capabilities, advice }, host) {
  const lacks = [];
  if (!capabilities.input_modalities.includes("audio")) lacks.push("It cannot hear: write to it.");
  if (!capabilities.output_modalities.includes("audio")) lacks.push("It has no voice: answers come as text.");
  if (parts?.llm?.name === "rules") lacks.push(NO_MODEL);
  if (lacks.length && !advice && !isHere(host)) lacks.push("Whoever runs this server can change that.");
  return lacks;
}

/* What an answer waits for that has not begun. `words` says whether what was said is written down. */
export function waitedFor({ parts }, words) {
  if (!words && parts?.asr) return `Still waiting for ${parts.asr.model} to write down what you said.`;
  const hosts = parts?.llm?.hosts ?? [];
  const { name, model: named } = parts?.llm ?? {};
  if (name === "rules") return "Still waiting for the rules to begin their answer.";
  const model = named ? `the model ${named}` : "the model";
  return `Still waiting for ${model}${hosts.length ? ` on ${hosts.join(" or ")}` : ""} to begin its answer.`;
}

function listed(things) {
  return things.length < 2 ? things.join("") : `${things.slice(0, -1).join(", ")} and ${things.at(-1)}`;
}

function verb(things) {
  return things.length === 1 && !things[0].endsWith("s") ? "goes" : "go";
}

function capitalised(text) {
  return text && text[0].toUpperCase() + text.slice(1);
}

/* What the server can do and cannot, in words: [can, what]. */
export function abilities(created) {
  const { input_modalities: takes, output_modalities: gives, ...can } = created.capabilities;
  const sights = seen(created);
  return [
    [takes.includes("audio"), "hear you"],
    [gives.includes("audio"), "speak"],
    [can.turn_detection, "notice by itself when you speak"],
    [can.turn_detection_types?.includes("semantic_vad") ?? false, "tell by your voice that you have finished"],
    [sights.includes("image"), "look at pictures"],
    [sights.includes("video"), "watch the camera or a screen"],
    [can.tools, "use the tools of this page"],
  ];
}

function nameOf(part) {
  return part && (NAMELESS.includes(part.name) ? part.model : part.name);
}
