import OpenAI from "openai";

const client = new OpenAI({
    baseURL: "http://127.0.0.1:8080/v1",
    apiKey: "not-needed",
});

const stream = await client.chat.completions.create({
    model: "local-model",
    messages: [{ role: "user", content: "Hello!" }],
    stream: true,
});

for await (const chunk of stream) {
    const content = chunk.choices[0]?.delta?.content ?? "";
    process.stdout.write(content);
}
