// The Vercel AI SDK with its providers for OpenAI and for servers like it.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";
import assert from "node:assert";
import { ask, MODEL, PROMPT, SCHEMA, URL } from "./asked.mjs";

const openai = createOpenAI({ baseURL: URL, apiKey: "none" });
const compatible = createOpenAICompatible({ name: "here", baseURL: URL, supportsStructuredOutputs: true });
const save = tool({ description: "Save a river", inputSchema: jsonSchema(SCHEMA), execute: async () => "saved" });
const few = { maxOutputTokens: 60, temperature: 0, maxRetries: 0, system: "Be concise.", prompt: PROMPT };
const river = (found) => {
  assert(["Elb", "Rhine"].includes(found.river));
  return found.river;
};
globalThis.AI_SDK_LOG_WARNINGS = false;

for (const [name, model] of [["openai.responses", openai.responses(MODEL)], ["openai.chat", openai.chat(MODEL)],
  ["openai-compatible", compatible(MODEL)]]) {
  await ask(`${name}: generateText`, async () => {
    const found = await generateText({ model, ...few, maxOutputTokens: 8 });
    assert(found.text.length > 0);
    return found.text;
  });
  await ask(`${name}: streamText`, async () => {
    let text = "";
    for await (const part of streamText({ model, ...few, maxOutputTokens: 8 }).textStream) text += part;
    assert(text.length > 0);
    return text;
  });
  await ask(`${name}: generateObject`, async () =>
    river((await generateObject({ model, ...few, schema: jsonSchema(SCHEMA) })).object));
  await ask(`${name}: a required tool`, async () => {
    const found = await generateText({ model, ...few, tools: { save }, toolChoice: "required" });
    assert.equal(found.toolResults[0].output, "saved");
    return river(found.toolCalls[0].input);
  });
  await ask(`${name}: a required tool, streamed`, async () => {
    const calls = await streamText({ model, ...few, tools: { save }, toolChoice: { type: "tool", toolName: "save" } }).toolCalls;
    return river(calls[0].input);
  });
  await ask(`${name}: a tool, and a step with its result`, async () => {
    const found = await generateText({ model, ...few, tools: { save }, toolChoice: "required", stopWhen: stepCountIs(2),
      prepareStep: ({ stepNumber }) => (stepNumber ? { toolChoice: "none" } : {}),
      providerOptions: { openai: { store: false } } });
    assert.equal(found.steps.length, 2);
    return `${found.steps.length} steps`;
  });
}
for (const [name, model] of [["openai.responses", openai.responses(MODEL)], ["openai.chat", openai.chat(MODEL)]]) {
  await ask(`${name}: several calls`, async () => {
    const found = await generateText({ model, ...few, maxOutputTokens: 900, tools: { save }, toolChoice: "required",
      providerOptions: { openai: { parallelToolCalls: true } } });
    assert(found.toolCalls.length > 1);
    found.toolCalls.forEach((call) => river(call.input));
    return `${found.toolCalls.length} calls`;
  });
}
