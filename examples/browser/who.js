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

function nameOf(part) {
  return part && (NAMELESS.includes(part.name) ? part.model : part.name);
}
