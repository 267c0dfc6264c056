// OpenAI's Agents SDK for Node over /v1/realtime. Arguments and output are those of realtime_openai_python.py.
import fs from "node:fs";
import path from "node:path";
import { tool } from "@openai/agents";
import { RealtimeAgent, RealtimeSession } from "@openai/agents/realtime";
import { z } from "zod";

const [answering, calling, first, second, folder] = process.argv.slice(2);
const PIECE = 4800;
const asked = [];
const weather = tool({
  name: "get_weather",
  description: "The weather in a city.",
  parameters: z.object({ city: z.string() }),
  execute: async (input) => { asked.push(input); return "sunny"; },
});

async function connect(url, tools) {
  const agent = new RealtimeAgent({ name: "Assistant", instructions: "Be brief.", tools });
  const session = new RealtimeSession(agent, { transport: "websocket", model: "gpt-realtime" });
  session.on("error", (error) => { throw new Error(JSON.stringify(error)); });
  await session.connect({ apiKey: "not-needed", url: `${url.replace("http", "ws")}/realtime?model=gpt-realtime` });
  return session;
}

function speak(session, file) {
  const audio = fs.readFileSync(file);
  for (let start = 0; start < audio.length; start += PIECE) {
    session.sendAudio(new Uint8Array(audio.subarray(start, start + PIECE)).buffer);
  }
}

const saidLast = (history) => {
  const spoken = history.filter((item) => item.role === "assistant").flatMap((item) => item.content);
  return spoken.at(-1)?.transcript;
};

async function turn() {
  const session = await connect(answering, []);
  const audio = [];
  const result = {};
  await new Promise((resolve) => {
    let done = false;
    session.on("audio", (event) => audio.push(Buffer.from(event.data)));
    session.on("transport_event", (event) => {
      if (event.type === "conversation.item.input_audio_transcription.completed") result.heard = event.transcript;
      if (event.type === "response.done") done = true;
      if (done && result.heard !== undefined) setImmediate(resolve);
    });
    speak(session, first);
  });
  result.said = saidLast(session.history);
  session.close();
  fs.writeFileSync(path.join(folder, "turn.pcm"), Buffer.concat(audio));
  return result;
}

async function call() {
  const session = await connect(calling, [weather]);
  const audio = [];
  const result = { interrupted: false };
  await new Promise((resolve) => {
    let interrupting = false;
    session.on("audio", (event) => {
      if (asked.length) audio.push(Buffer.from(event.data));
      if (interrupting) return;
      interrupting = true;
      speak(session, second);
    });
    session.on("audio_interrupted", () => { result.interrupted = true; });
    session.on("transport_event", (event) => {
      if (event.type === "response.done" && audio.length) setImmediate(resolve);
    });
    speak(session, first);
  });
  [result.asked] = asked;
  result.told = saidLast(session.history);
  session.close();
  fs.writeFileSync(path.join(folder, "told.pcm"), Buffer.concat(audio));
  return result;
}

console.log(JSON.stringify({ ...(await turn()), ...(await call()) }));
