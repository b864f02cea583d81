// The `openai` package for Node against Naru, unchanged. Arguments: URL. Fails by an exception.
import assert from "node:assert/strict";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Name the capital of France." }];
const asked = { model: "smollm2", messages, temperature: 0, max_tokens: 24 };

const whole = await client.chat.completions.create(asked);
assert.match(whole.choices[0].message.content, /Paris/);

let text = "";
for await (const chunk of await client.chat.completions.create({ ...asked, stream: true })) {
  text += chunk.choices[0]?.delta?.content ?? "";
}
assert.equal(text, whole.choices[0].message.content);

const parameters = {
  type: "object",
  properties: { city: { type: "string", maxLength: 20 } },
  required: ["city"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "get_weather", parameters } }];
const runner = client.chat.completions.stream({ ...asked, max_tokens: 120, tools, tool_choice: "required" });
const call = (await runner.finalChatCompletion()).choices[0].message.tool_calls[0];
assert.equal(call.function.name, "get_weather");
assert.deepEqual(Object.keys(JSON.parse(call.function.arguments)), ["city"]);

const vectors = await client.embeddings.create({ model: "minilm", input: ["a", "b"] });
assert.deepEqual(vectors.data.map((each) => each.embedding.length), [384, 384]);

const response = await client.responses.create({
  model: "smollm2", input: "Name the capital of France.", temperature: 0, max_output_tokens: 24,
});
assert.match(response.output_text, /Paris/);

await assert.rejects(client.chat.completions.create({ ...asked, model: "nobody" }), OpenAI.NotFoundError);
const names = [];
for await (const model of client.models.list()) names.push(model.id);
assert.ok(names.includes("smollm2"));
console.log("ok: openai for Node");
