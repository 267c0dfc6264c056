// The openai package of Node, as its users use it. The base URL and a recording are the arguments.
import assert from "node:assert/strict";
import fs from "node:fs";
import OpenAI from "openai";

const [baseURL, recording] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "not-needed", maxRetries: 0 });
const model = "local-model";
const user = (content) => [{ role: "user", content }];
const weather = {
  type: "function",
  function: { name: "get_weather", parameters: { type: "object", properties: { city: { type: "string" } } } },
};

const whole = await client.chat.completions.create({ model, messages: user("hello big world") });
assert.equal(whole.choices[0].message.content, "hello big world");

let text = "";
const chunks = await client.chat.completions.create({ model, messages: user("hello big world"), stream: true });
for await (const chunk of chunks) text += chunk.choices[0]?.delta?.content ?? "";
assert.equal(text, "hello big world");

const calling = client.chat.completions.stream({ model, messages: user("Weather?"), tools: [weather] });
const called = await calling.finalChatCompletion();
assert.equal(called.choices[0].finish_reason, "tool_calls");
assert.deepEqual(JSON.parse(called.choices[0].message.tool_calls[0].function.arguments), { city: "Tokyo" });

const several = client.chat.completions.stream({ model, messages: user("a b"), n: 2, logprobs: true });
const choices = (await several.finalChatCompletion()).choices;
assert.deepEqual(choices.map((choice) => choice.message.content), ["a b", "a b"]);
assert.equal(choices[1].logprobs.content.length, 2);

text = "";
for await (const chunk of await client.completions.create({ model, prompt: "a b", stream: true })) {
  text += chunk.choices[0].text;
}
assert.equal(text, "a b");

const speech = await client.audio.speech.create({
  model: "tts-1", voice: "alloy", input: "one", response_format: "wav",
});
assert.equal(Buffer.from(await speech.arrayBuffer()).subarray(0, 4).toString(), "RIFF");

const file = () => fs.createReadStream(recording);
assert.equal((await client.audio.transcriptions.create({ model: "whisper-1", file: file() })).text, "go forward");
const events = [];
const heard = await client.audio.transcriptions.create({ model: "gpt-4o-mini-transcribe", file: file(), stream: true });
for await (const event of heard) events.push(event.type);
assert.deepEqual(events, ["transcript.text.delta", "transcript.text.delta", "transcript.text.done"]);

for (const stream of [false, true]) {
  await assert.rejects(
    client.chat.completions.create({ model, messages: user("a"), n: 0, stream }),
    (error) => error instanceof OpenAI.BadRequestError && error.param === "n",
  );
}
const breaking = await client.chat.completions.create({ model, messages: user("please break now"), stream: true });
await assert.rejects(async () => {
  for await (const _ of breaking) { /* until it breaks */ }
}, /the engine broke/);
console.log("all passed");
