// The published Node packages of OpenAI and Anthropic talk to the gateway at the address of the first argument.
//
// The second argument is a model with a chat template, the third the text, in JSON, that it answers to PROMPT within eight
// tokens at temperature 0. Prints the packages' versions; a failed assertion is a failure.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import Anthropic from "@anthropic-ai/sdk";
import OpenAI from "openai";

const PROMPT = "ab";
const TOKENS = 8;
const SCHEMA = {
  type: "object",
  properties: { kind: { enum: ["cat", "dog"] } },
  required: ["kind"],
  additionalProperties: false,
};
const [base, model, expected] = process.argv.slice(2);
const text = JSON.parse(expected);

function check(argumentsText) {
  const { kind } = typeof argumentsText === "string" ? JSON.parse(argumentsText) : argumentsText;
  assert(["cat", "dog"].includes(kind), kind);
}

async function chats(client) {
  const names = [];
  for await (const one of client.models.list()) names.push(one.id);
  assert(names.includes(model), names.join());
  const vectors = await client.embeddings.create({ model, input: ["ab", "ba"] });
  assert.equal(vectors.data.length, 2);
  const length = Math.hypot(...vectors.data[0].embedding);
  assert(Math.abs(length - 1) < 1e-5, `${length}`);
  const ask = { model, messages: [{ role: "user", content: PROMPT }], temperature: 0, max_tokens: TOKENS };
  const whole = await client.chat.completions.create(ask);
  assert.equal(whole.choices[0].message.content, text);
  assert.equal(whole.usage.completion_tokens, TOKENS);
  let streamed = "";
  for await (const chunk of await client.chat.completions.create({ ...ask, stream: true }))
    streamed += chunk.choices[0].delta.content ?? "";
  assert.equal(streamed, text);
  const tools = [{ type: "function", function: { name: "buy", description: "Buys a pet.", parameters: SCHEMA } }];
  const demand = { model, messages: ask.messages, tools, tool_choice: "required", parallel_tool_calls: false, seed: 1 };
  const final = await client.chat.completions.stream(demand).finalChatCompletion();
  assert.equal(final.choices[0].finish_reason, "tool_calls");
  const [call] = final.choices[0].message.tool_calls;
  check(call.function.arguments);
  const messages = [...ask.messages, final.choices[0].message, { role: "tool", tool_call_id: call.id, content: "sold" }];
  const after = await client.chat.completions.create({ ...ask, messages, tools });
  assert(after.usage.prompt_tokens > final.usage?.prompt_tokens || after.usage.prompt_tokens > whole.usage.prompt_tokens);
  await assert.rejects(client.chat.completions.create({ ...ask, model: "none" }), (error) => {
    assert(error instanceof OpenAI.NotFoundError, `${error}`);
    return error.code === "model_not_found";
  });
}

async function responses(client) {
  const ask = { model, input: PROMPT, temperature: 0, max_output_tokens: TOKENS };
  const whole = await client.responses.create(ask);
  assert.equal(whole.output_text, text);
  let streamed = "";
  let last;
  for await (const event of await client.responses.create({ ...ask, stream: true })) {
    if (event.type === "response.output_text.delta") streamed += event.delta;
    last = event;
  }
  assert.equal(streamed, text);
  assert.equal(last.type, "response.incomplete");
  const after = await client.responses.create({ ...ask, previous_response_id: whole.id });
  assert(after.usage.input_tokens > whole.usage.input_tokens);
  assert.equal((await client.responses.retrieve(whole.id)).output_text, text);
  await client.responses.delete(whole.id);
  await assert.rejects(client.responses.retrieve(whole.id), OpenAI.NotFoundError);
  const tools = [{ type: "function", name: "buy", description: "Buys a pet.", parameters: SCHEMA, strict: true }];
  const called = await client.responses.create({ model, input: PROMPT, tools, tool_choice: "required", parallel_tool_calls: false, seed: 1 });
  check(called.output.find((item) => item.type === "function_call").arguments);
}

// All tokens of a prompt: those that were known already are apart.
const ofPrompt = (usage) => usage.input_tokens + usage.cache_read_input_tokens;

async function messages(client) {
  const ask = { model, messages: [{ role: "user", content: PROMPT }], max_tokens: TOKENS, temperature: 0 };
  const whole = await client.messages.create(ask);
  assert.equal(whole.content[0].text, text);
  assert.equal(whole.stop_reason, "max_tokens");
  const final = await client.messages.stream(ask).finalMessage();
  assert.equal(final.content[0].text, text);
  const counted = await client.messages.countTokens({ model, messages: ask.messages });
  assert.equal(counted.input_tokens, ofPrompt(whole.usage));
  const tools = [{ name: "buy", description: "Buys a pet.", input_schema: SCHEMA }];
  const demand = { model, messages: ask.messages, max_tokens: 500, tools, top_k: 1 };
  const called = await client.messages.stream({ ...demand, tool_choice: { type: "any", disable_parallel_tool_use: true } }).finalMessage();
  const [block] = called.content;
  assert.equal(called.stop_reason, "tool_use");
  check(block.input);
  const result = { role: "user", content: [{ type: "tool_result", tool_use_id: block.id, content: "sold" }] };
  const talk = [...ask.messages, { role: "assistant", content: called.content }, result];
  const after = await client.messages.create({ ...ask, tools, messages: talk });
  assert(ofPrompt(after.usage) > ofPrompt(called.usage));
  await assert.rejects(client.messages.create({ ...ask, model: "none" }), Anthropic.NotFoundError);
}

function version(name) {
  const url = new URL(`node_modules/${name}/package.json`, import.meta.url);
  console.log(name, JSON.parse(readFileSync(url, "utf8")).version);
}

const openai = new OpenAI({ baseURL: `${base}/v1`, apiKey: "unused", maxRetries: 0 });
await chats(openai);
await responses(openai);
version("openai");
await messages(new Anthropic({ baseURL: base, apiKey: "unused", maxRetries: 0 }));
version("@anthropic-ai/sdk");
