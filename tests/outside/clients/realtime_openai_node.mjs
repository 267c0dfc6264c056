// The openai package of Node over /v1/realtime. Arguments and output are those of realtime_openai_python.py.
import assert from "node:assert/strict";
import fs from "node:fs";
import path from "node:path";
import OpenAI from "openai";
import { OpenAIRealtimeWS } from "openai/realtime/ws";

const [answering, calling, first, second, folder] = process.argv.slice(2);
const PIECE = 4800;
const weather = {
  type: "function",
  name: "get_weather",
  description: "The weather in a city.",
  parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
};
const session = {
  type: "realtime",
  instructions: "Be brief.",
  output_modalities: ["audio"],
  audio: {
    input: { transcription: { model: "gpt-4o-mini-transcribe" }, turn_detection: { type: "server_vad" } },
    output: { voice: "marin" },
  },
};

async function connect(baseURL) {
  const client = new OpenAI({ baseURL, apiKey: "not-needed", maxRetries: 0 });
  const realtime = new OpenAIRealtimeWS({ model: "gpt-realtime" }, client);
  realtime.on("error", (error) => { throw error; });
  await new Promise((resolve) => realtime.socket.on("open", resolve));
  return realtime;
}

function speak(realtime, file) {
  const audio = fs.readFileSync(file);
  for (let start = 0; start < audio.length; start += PIECE) {
    const piece = audio.subarray(start, start + PIECE).toString("base64");
    realtime.send({ type: "input_audio_buffer.append", audio: piece });
  }
}

async function turn() {
  const realtime = await connect(answering);
  realtime.send({ type: "session.update", session });
  const audio = [];
  const result = {};
  await new Promise((resolve) => {
    let done = false;
    realtime.on("event", (event) => {
      if (event.type === "response.output_audio.delta") audio.push(Buffer.from(event.delta, "base64"));
      if (event.type === "response.output_audio_transcript.done") result.said = event.transcript;
      if (event.type === "conversation.item.input_audio_transcription.completed") result.heard = event.transcript;
      if (event.type === "response.done") {
        assert.equal(event.response.status, "completed");
        done = true;
      }
      if (done && result.heard !== undefined) resolve();
    });
    speak(realtime, first);
  });
  realtime.close();
  fs.writeFileSync(path.join(folder, "turn.pcm"), Buffer.concat(audio));
  return result;
}

async function call() {
  const realtime = await connect(calling);
  realtime.send({ type: "session.update", session: { ...session, tools: [weather] } });
  const audio = [];
  const result = { statuses: [] };
  let playing, output;
  await new Promise((resolve) => {
    realtime.on("response.output_audio.delta", (event) => {
      if (output) audio.push(Buffer.from(event.delta, "base64"));
      if (playing) return;
      playing = event.item_id;
      speak(realtime, second);
    });
    realtime.on("input_audio_buffer.speech_started", () => {
      if (!playing) return;
      realtime.send({ type: "conversation.item.truncate", item_id: playing, content_index: 0, audio_end_ms: 200 });
    });
    realtime.on("conversation.item.truncated", (event) => { result.truncated = event.audio_end_ms; });
    realtime.on("response.function_call_arguments.done", (event) => {
      result.asked = JSON.parse(event.arguments);
      output = { type: "function_call_output", call_id: event.call_id, output: "sunny" };
    });
    realtime.on("response.output_audio_transcript.done", (event) => { if (output) result.told = event.transcript; });
    realtime.on("response.done", (event) => {
      result.statuses.push(event.response.status);
      if (result.statuses.length === 3) return resolve();
      if (!output) return;
      realtime.send({ type: "conversation.item.create", item: output });
      realtime.send({ type: "response.create" });
    });
    speak(realtime, first);
  });
  realtime.close();
  fs.writeFileSync(path.join(folder, "told.pcm"), Buffer.concat(audio));
  return result;
}

console.log(JSON.stringify({ ...(await turn()), ...(await call()) }));
