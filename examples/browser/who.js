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
  const words = told.map(({ verbs, name }) => `${verbs.join(" and ")} by ${name}`).join(", ");
  return words && `${words[0].toUpperCase()}${words.slice(1)}.`;
}

/* The names alone, for the head of the page: "whisper · rules · hibari". */
export function brief(created) {
  return [...new Set(Object.values(workers(created)).filter(Boolean))].join(" · ");
}

/* Where a voice and words go: sentences. `host` is that of the page's address. */
export function places({ parts, capabilities }, host) {
  const here = /^(localhost|127\..*|\[::1\])$/.test(host);
  const told = [`Your voice and words go to ${here ? "this machine" : host}.`];
  const beyond = (role) => parts?.[role]?.name === "remote";
  const hears = beyond("asr") || (beyond("llm") && !parts.asr && capabilities.input_modalities.includes("audio"));
  const handed = [[hears, "your voice"], [beyond("llm"), "your words"], [beyond("tts"), "the words of answers"]];
  const what = handed.filter(([far]) => far).map(([, one]) => one).join(" and ");
  if (what) told.push(`From there ${what} go on to another server, which the operator has chosen.`);
  else if (parts) told.push("No other server takes part.");
  return told;
}

/* What the server can do and cannot, in words: [can, what]. */
export function abilities({ capabilities: { input_modalities: takes, output_modalities: gives, ...can } }) {
  return [
    [takes.includes("audio"), "hear you"],
    [gives.includes("audio"), "speak"],
    [can.turn_detection, "notice by itself when you speak"],
    [can.turn_detection_types?.includes("semantic_vad") ?? false, "tell by your voice that you have finished"],
    [takes.includes("image"), "look at pictures"],
    [takes.includes("video"), "watch the camera"],
    [can.tools, "use the tools of this page"],
  ];
}

function nameOf(part) {
  return part && (NAMELESS.includes(part.name) ? part.model : part.name);
}
