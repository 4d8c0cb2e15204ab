// The openai package of npm.
import OpenAI from "openai";
import assert from "node:assert";
import { ask, MODEL, PROMPT, SCHEMA, URL } from "./asked.mjs";

const client = new OpenAI({ baseURL: URL, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "developer", content: "Be concise." }, { role: "user", content: PROMPT }];
const shared = { model: MODEL, messages, temperature: 0, max_tokens: 60 };
const format = { type: "json_schema", json_schema: { name: "river", strict: true, schema: SCHEMA } };
const tools = [{ type: "function", function: { name: "save", parameters: SCHEMA } }];
const river = (text) => {
  const found = JSON.parse(text).river;
  assert(["Elb", "Rhine"].includes(found));
  return found;
};

await ask("chat.completions.create", async () => {
  const found = await client.chat.completions.create({ ...shared, max_tokens: 8 });
  assert(found.choices[0].message.content.length > 0);
  return found.choices[0].message.content;
});
await ask("chat.completions.create, streamed", async () => {
  const stream = await client.chat.completions.create({ ...shared, max_tokens: 8, stream: true });
  let text = "";
  for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? "";
  assert(text.length > 0);
  return text;
});
await ask("chat.completions.parse (response_format json_schema)", async () => {
  const found = await client.chat.completions.parse({ ...shared, response_format: format });
  return river(found.choices[0].message.content);
});
await ask("a required tool, parallel_tool_calls=false", async () => {
  const found = await client.chat.completions.create({ ...shared, tools, tool_choice: "required", parallel_tool_calls: false });
  const [call, ...more] = found.choices[0].message.tool_calls;
  assert.equal(more.length, 0);
  return river(call.function.arguments);
});
await ask("required tools, parallel_tool_calls=true, streamed", async () => {
  const stream = client.chat.completions.stream({ ...shared, max_tokens: 900, tools, tool_choice: "required",
    parallel_tool_calls: true });
  const calls = (await stream.finalChatCompletion()).choices[0].message.tool_calls;
  assert(calls.length > 1);
  calls.forEach((call) => river(call.function.arguments));
  return `${calls.length} calls`;
});
await ask("chat.completions.runTools: a tool and its result", async () => {
  let saved = 0;
  const given = { type: "function", function: { name: "save", parameters: SCHEMA, parse: JSON.parse, function: () => {
    saved += 1;
    return "saved";
  } } };
  const runner = client.chat.completions.runTools({ ...shared, tools: [given],
    tool_choice: { type: "function", function: { name: "save" } } }, { maxChatCompletions: 2 });
  await runner.done();
  assert(saved > 0);
  return `${saved} calls`;
});
await ask("responses.create", async () => {
  const found = await client.responses.create({ model: MODEL, instructions: "Be concise.", input: PROMPT, max_output_tokens: 8 });
  assert(found.output_text.length > 0);
  return found.output_text;
});
await ask("responses.stream, with log probabilities", async () => {
  const stream = client.responses.stream({ model: MODEL, input: PROMPT, max_output_tokens: 8, temperature: 0,
    include: ["message.output_text.logprobs"], top_logprobs: 2 });
  const whole = await stream.finalResponse();
  assert.equal(whole.output[0].content[0].logprobs[0].top_logprobs.length, 2);
  return whole.output_text;
});
await ask("responses.parse", async () => {
  const found = await client.responses.parse({ model: MODEL, input: PROMPT, max_output_tokens: 60, temperature: 0,
    text: { format: { type: "json_schema", name: "river", strict: true, schema: SCHEMA } } });
  return river(found.output_text);
});
