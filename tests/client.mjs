// Calls a server by npm's `openai`, unmodified; prints what it got as JSON.
// usage: node client.mjs URL KEY MODEL PASSAGE
import OpenAI from "openai";

const [url, apiKey, model, passage] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey, maxRetries: 0 });
const messages = [{ role: "user", content: `${passage}\n\nQuestion: Who?\nAnswer:` }];
const asked = { model, messages, max_tokens: 8, temperature: 0 };

const whole = await client.chat.completions.create(asked);
const stream = await client.chat.completions.create({
  ...asked,
  stream: true,
  stream_options: { include_usage: true },
});
let text = "";
let usage = null;
for await (const chunk of stream) {
  text += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
const helper = client.chat.completions.stream(asked);
const response = await client.responses.create({ model, input: "Who?", max_output_tokens: 16 });
const deltas = [];
for await (const event of await client.responses.create({
  model,
  input: "Who?",
  max_output_tokens: 16,
  stream: true,
})) {
  deltas.push(event.type);
}
const parameters = {
  type: "object",
  properties: { on: { type: "boolean" } },
  required: ["on"],
  additionalProperties: false,
};
const called = await client.chat.completions.create({
  ...asked,
  max_tokens: 64,
  tools: [{ type: "function", function: { name: "light", parameters } }],
  tool_choice: { type: "function", function: { name: "light" } },
});
const failed = await client.chat.completions
  .create({ ...asked, model: "other" })
  .catch((error) => error.status);
console.log(
  JSON.stringify({
    whole: whole.choices[0].message.content,
    streamed: text,
    helped: await helper.finalContent(),
    cached: whole.usage.prompt_tokens_details.cached_tokens,
    streamedCached: usage.prompt_tokens_details.cached_tokens,
    arguments: called.choices[0].message.tool_calls?.[0]?.function.arguments ?? null,
    models: (await client.models.list()).data.map((one) => one.id),
    response: response.output_text,
    last: deltas.at(-1),
    failed,
  }),
);
