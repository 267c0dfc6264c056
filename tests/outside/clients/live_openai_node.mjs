// The openai package of Node over /v1/live/sessions. Arguments, call and events.jsonl are those of live_call.py.
import fs from "node:fs";
import path from "node:path";
import OpenAI from "openai";
import { LiveWS } from "openai/resources/live/ws";

const [baseURL, question, other, task, folder] = process.argv.slice(2);
const clips = { question, other, task };
const WORK_MS = Number(process.env.LIVE_WORK_SEC) * 1000;
const PIECE_MS = 100;
const PIECE = (24_000 * PIECE_MS) / 1000 * 2;
const LOUD = 59;
// The work ends as the caller speaks, with so little left to say that the server has heard him.
const LEFT = 3 * PIECE;
const QUIET_MS = 600;
const PATIENCE_MS = 60_000;

const client = new OpenAI({ baseURL, apiKey: "not-needed", maxRetries: 0 });
const live = new LiveWS(client);
const log = fs.openSync(path.join(folder, "events.jsonl"), "w");
let started = false, closed = false, gone = false, delegated = false, transcript = "", sounded = 0;
let clip = Buffer.alloc(0), endsWork = false, endWork;
const worked = new Promise((resolve) => { endWork = resolve; });

const write = (line) => fs.writeSync(log, `${JSON.stringify({ at: performance.now() / 1000, ...line })}\n`);
const did = (what) => write({ did: what });
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

function level(audio) {
  let sum = 0;
  for (let place = 0; place < audio.length; place += 2) sum += audio.readInt16LE(place) ** 2;
  return Math.sqrt(sum / Math.max(1, audio.length / 2));
}

async function until(condition, what) {
  for (let end = performance.now() + PATIENCE_MS; !condition(); await sleep(10)) {
    if (performance.now() > end) throw new Error(`${what} did not come about; said so far: ${transcript}`);
  }
}

live.on("error", (error) => { throw error; });
live.on("close", () => { gone = true; });
live.on("event", (event) => write({ event }));
live.on("session.started", () => { started = true; });
live.on("session.closed", () => { closed = true; });
live.on("session.output_transcript.delta", ({ delta }) => { transcript += delta; });
live.on("session.output_audio.delta", ({ delta }) => {
  if (level(Buffer.from(delta, "base64")) > LOUD) sounded = performance.now();
});
live.on("session.delegation.created", async ({ delegation }) => {
  delegated = true;
  const named = { delegation_id: delegation.id };
  live.send({ type: "session.thinking.append", content: "It is being looked up.", event_id: "thinking", ...named });
  await worked;
  did("result");
  live.send({ type: "session.commentary.append", content: "The parcel is in Lisbon.", event_id: "result", ...named });
});

async function microphone() {
  for (let due = performance.now(); !closed; await sleep(Math.max(0, due - performance.now()))) {
    const piece = Buffer.alloc(PIECE);
    clip.copy(piece, 0, 0, PIECE);
    clip = clip.subarray(PIECE);
    live.send({ type: "session.input_audio.append", audio: piece.toString("base64") });
    if (endsWork && clip.length <= LEFT) endWork();
    due += PIECE_MS;
  }
}

async function say(name) {
  did(`begins ${name}`);
  clip = fs.readFileSync(clips[name]);
  await until(() => !clip.length, "the last word");
  did(`ends ${name}`);
  return performance.now();
}

async function answer(since) {
  await until(() => sounded > since, "an answer");
  await silence();
}

const silence = () => until(() => performance.now() - sounded > QUIET_MS, "the end of an answer");

did("calls");
live.send({
  type: "session.start",
  event_id: "start",
  session: {
    model: "gpt-live-1",
    instructions: "Be brief. Delegate whatever has to be looked up.",
    audio: { format: { type: "audio/pcm", rate: 24_000 }, output: { voice: "marin" } },
    delegation: { type: "client" },
  },
});
await until(() => started, "the session");
const speaking = microphone();
let begun = performance.now();
const greet = "Greet the caller by the name Ann.";
live.send({ type: "session.commentary.append", content: greet, delegation_id: null, event_id: "greet" });
await answer(begun);
await answer(await say("question"));
await say("task");
await until(() => delegated, "the delegation");
begun = performance.now();
await answer(0);
await answer(await say("question"));
did("asks for a story");
const asked = await say("other");
await until(() => sounded > asked, "the story");
const heard = sounded;
await until(() => sounded > heard + 1000, "a second of the story");
did("interrupts");
await answer(await say("question"));
did("tells no more of the story");
live.send({ type: "session.input_audio.mute", event_id: "mute" });
await say("other");
await sleep(1000);
live.send({ type: "session.input_audio.unmute", event_id: "unmute" });
await until(() => performance.now() > begun + WORK_MS, "the time of the result");
endsWork = true;
await say("other");
await until(() => transcript.includes("Lisbon"), "the result");
await silence();
await sleep(2000);
did("closes");
live.send({ type: "session.close", event_id: "close" });
await until(() => closed && gone, "the end of the session");
await speaking;
fs.closeSync(log);
