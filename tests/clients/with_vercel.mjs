// Vercel's AI SDK: a tool returns objects.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const { CLIENT_URL: url, CLIENT_KEY: apiKey, CLIENT_MODEL: name, CLIENT_NOTES: notes } = process.env;
const provider = createOpenAICompatible({ name: "here", baseURL: `${url}/v1`, apiKey });
const plain = { model: provider(name), temperature: 0, maxOutputTokens: 16 };
const prompt = "What is a cache? Answer in one sentence.";

let streamed = "";
for await (const part of streamText({ ...plain, prompt }).textStream) streamed += part;
const search = tool({
  description: "Search the notes.",
  inputSchema: z.object({ words: z.string() }),
  execute: async () => JSON.parse(notes).map((text, at) => ({ title: `note ${at}`, text })),
});
const called = await generateText({
  ...plain,
  prompt: "What do the notes say?",
  maxOutputTokens: 64,
  tools: { search },
  stopWhen: stepCountIs(2),
});
const { text: answer } = await generateText({ ...plain, prompt });
console.log(JSON.stringify({ answer, streamed, after_tool: called.text }));
