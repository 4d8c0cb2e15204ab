// The Vercel AI SDK and the openai package of npm: node vercel_client.mjs URL MODEL, in a folder with these packages:
// npm install ai@VERSION @ai-sdk/openai@VERSION openai@VERSION zod
import { createOpenAI } from "@ai-sdk/openai";
import { generateObject, generateText, jsonSchema, streamText, tool } from "ai";
import OpenAI from "openai";
import assert from "node:assert";

const [URL, MODEL] = process.argv.slice(2);
const PROMPT = "The river of Githbrel is";
const provider = createOpenAI({ baseURL: URL, apiKey: "none" });
const client = new OpenAI({ baseURL: URL, apiKey: "none", maxRetries: 0 });
const SCHEMA = { $defs: { R: { enum: ["Elb", "Rhine"], type: "string" } }, type: "object", required: ["river"],
  properties: { river: { $ref: "#/$defs/R" } }, additionalProperties: false };
const tools = { save: tool({ description: "Save a river", inputSchema: jsonSchema(SCHEMA), execute: async () => "saved" }) };
const few = { maxOutputTokens: 60, temperature: 0, maxRetries: 0 };

async function ask(asked, answer) {
  try {
    console.log(JSON.stringify({ asked, fine: true, found: String(await answer()) }));
  } catch (error) {
    console.log(JSON.stringify({ asked, fine: false, found: `${error.name}: ${error.message}` }));
  }
}

for (const [name, model] of [["responses", provider.responses(MODEL)], ["chat", provider.chat(MODEL)]]) {
  await ask(`${name}: generateText`, async () => {
    const found = await generateText({ model, prompt: PROMPT, ...few, maxOutputTokens: 8 });
    assert(found.text.length > 0);
    return found.text;
  });
  await ask(`${name}: streamText`, async () => {
    let text = "";
    for await (const part of streamText({ model, prompt: PROMPT, ...few, maxOutputTokens: 8 }).textStream) text += part;
    assert(text.length > 0);
    return text;
  });
  await ask(`${name}: a tool with $defs, forced`, async () => {
    const found = await generateText({ model, prompt: PROMPT, tools, toolChoice: "required", ...few });
    assert(["Elb", "Rhine"].includes(found.toolCalls[0].input.river));
    assert.equal(found.toolResults[0].output, "saved");
    return JSON.stringify(found.toolCalls[0].input);
  });
  await ask(`${name}: a forced tool, streamed`, async () => {
    const found = streamText({ model, prompt: PROMPT, tools, toolChoice: "required", ...few });
    const calls = await found.toolCalls;
    assert(["Elb", "Rhine"].includes(calls[0].input.river));
    return JSON.stringify(calls[0].input);
  });
  await ask(`${name}: generateObject`, async () => {
    const found = await generateObject({ model, prompt: PROMPT, schema: jsonSchema(SCHEMA), ...few });
    assert(["Elb", "Rhine"].includes(found.object.river));
    return JSON.stringify(found.object);
  });
}
const TOOL = { type: "function", function: { name: "save", parameters: SCHEMA } };
await ask("openai: chat with a forced tool and parallel_tool_calls=false", async () => {
  const found = await client.chat.completions.create({ model: MODEL, max_tokens: 60, temperature: 0, tools: [TOOL],
    messages: [{ role: "user", content: PROMPT }], tool_choice: "required", parallel_tool_calls: false });
  const [call, ...more] = found.choices[0].message.tool_calls;
  assert.equal(more.length, 0);
  return call.function.arguments;
});
await ask("openai: responses, streamed, with log probabilities", async () => {
  const stream = client.responses.stream({ model: MODEL, input: PROMPT, max_output_tokens: 8, temperature: 0,
    include: ["message.output_text.logprobs"], top_logprobs: 2 });
  const whole = await stream.finalResponse();
  assert.equal(whole.output[0].content[0].logprobs[0].top_logprobs.length, 2);
  return whole.output_text;
});
