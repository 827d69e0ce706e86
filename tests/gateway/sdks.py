"""The published Python packages of OpenAI, Anthropic and Ollama talk to the gateway at the address of the first argument.

Prometheus's own package then reads the counters.

The second argument is a model with a chat template, the third the text, in JSON, that it answers to PROMPT within eight
tokens at temperature 0. Prints the packages' versions; a failed assertion is a failure.
"""

import json
import sys
import urllib.request
from importlib.metadata import version

import anthropic
import ollama
import openai
from prometheus_client.parser import text_string_to_metric_families

PROMPT = "ab"
TOKENS = 8
SCHEMA = {"type": "object", "properties": {"kind": {"enum": ["cat", "dog"]}}, "required": ["kind"], "additionalProperties": False}
TOOL = {"name": "buy", "description": "Buys a pet.", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": TOOL}]


def with_openai(base, model, text):
    client = openai.OpenAI(base_url=f"{base}/v1", api_key="unused", max_retries=0)
    assert model in [one.id for one in client.models.list()]
    assert client.models.retrieve(model).id == model
    ask = {"model": model, "messages": [{"role": "user", "content": PROMPT}], "temperature": 0, "max_tokens": TOKENS}
    vectors = client.embeddings.create(model=model, input=["ab", "ba"])
    plain = client.embeddings.create(model=model, input="ba", encoding_format="float")
    assert len(vectors.data) == 2 and vectors.data[1].embedding == plain.data[0].embedding, vectors
    assert abs(sum(x * x for x in plain.data[0].embedding) - 1) < 1e-5
    whole = client.chat.completions.create(**ask)
    assert whole.choices[0].message.content == text, whole
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == TOKENS
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text, chunks
    assert chunks[-1].usage.completion_tokens == TOKENS
    with_logprobs = client.chat.completions.create(**ask, logprobs=True, top_logprobs=2)
    assert len(with_logprobs.choices[0].logprobs.content) == TOKENS
    assert len(with_logprobs.choices[0].logprobs.content[0].top_logprobs) == 2
    raw = {"model": model, "prompt": PROMPT, "temperature": 0, "max_tokens": TOKENS}
    completion = client.completions.create(**raw)
    assert "".join(c.choices[0].text for c in client.completions.create(**raw, stream=True)) == completion.choices[0].text
    try:
        client.chat.completions.create(**{**ask, "model": "none"})
        raise AssertionError("an unknown model was answered")
    except openai.NotFoundError as error:
        assert error.code == "model_not_found" and error.param == "model", error
    with_openais_tools(client, model)
    with_openais_responses(client, model, text)
    form = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA, "strict": True}}
    pet = client.chat.completions.create(model=model, messages=ask["messages"], seed=1, response_format=form)
    assert json.loads(pet.choices[0].message.content)["kind"] in ("cat", "dog"), pet
    assert pet.choices[0].finish_reason == "stop", pet
    biased = client.chat.completions.create(**ask, logit_bias={"260": 100}, frequency_penalty=0.5, presence_penalty=0.5)
    assert biased.choices[0].message.content == "a" * TOKENS, biased
    # An answer that is left is cancelled.
    with client.chat.completions.create(**{**ask, "max_tokens": 1000}, stream=True) as stream:
        next(iter(stream))


def with_openais_tools(client, model):
    messages = [{"role": "user", "content": PROMPT}]
    ask = {"model": model, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "seed": 1}
    whole = client.chat.completions.create(**ask, messages=messages)
    assert whole.choices[0].finish_reason == "tool_calls", whole
    (call,) = whole.choices[0].message.tool_calls
    assert call.function.name == "buy" and json.loads(call.function.arguments)["kind"] in ("cat", "dog"), call
    with client.chat.completions.stream(**ask, messages=messages) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion().choices[0].message.tool_calls
    assert [(one.name, one.arguments) for one in done] == [(call.function.name, call.function.arguments)], done
    assert final[0].function.arguments == call.function.arguments, final
    messages += [whole.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "sold"}]
    after = client.chat.completions.create(model=model, messages=messages, tools=TOOLS, max_tokens=4, temperature=0)
    assert after.usage.prompt_tokens > whole.usage.prompt_tokens, after
    try:
        client.chat.completions.create(model=model, messages=messages, tools=[{"type": "custom", "custom": {"name": "f"}}])
        raise AssertionError("a tool that is no function was accepted")
    except openai.BadRequestError as error:
        assert error.param == "tools[0].type", error


def with_openais_responses(client, model, text):
    ask = {"model": model, "temperature": 0, "max_output_tokens": TOKENS}
    whole = client.responses.create(**ask, input=PROMPT)
    assert whole.output_text == text and whole.status == "incomplete", whole
    assert whole.incomplete_details.reason == "max_output_tokens" and whole.usage.output_tokens == TOKENS, whole
    with client.responses.stream(**ask, input=[{"role": "user", "content": PROMPT}]) as stream:
        told = list(stream)
    # The package's own `get_final_response` knows none that is incomplete.
    assert told[-1].type == "response.incomplete" and told[-1].response.output_text == text, told
    assert "".join(event.delta for event in told if event.type == "response.output_text.delta") == text, told
    after = client.responses.create(**ask, input=PROMPT, previous_response_id=whole.id, instructions="be good")
    assert after.usage.input_tokens > whole.usage.input_tokens and after.previous_response_id == whole.id, after
    assert client.responses.retrieve(whole.id) == whole
    client.responses.delete(whole.id)
    for missing in [lambda: client.responses.retrieve(whole.id), lambda: client.responses.delete(whole.id)]:
        try:
            missing()
            raise AssertionError("a response that was deleted is there")
        except openai.NotFoundError:
            pass
    tool = {"type": "function", "strict": True, **TOOL}
    asked = [{"role": "user", "content": PROMPT}]
    demand = {"model": model, "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False, "extra_body": {"seed": 1}}
    with client.responses.stream(**demand, input=asked) as stream:
        (call,) = stream.get_final_response().output
    assert call.type == "function_call" and json.loads(call.arguments)["kind"] in ("cat", "dog"), call
    asked += [call, {"type": "function_call_output", "call_id": call.call_id, "output": "sold"}]
    sent = client.responses.create(**ask, input=asked, tools=[tool])
    assert sent.usage.output_tokens == TOKENS, sent
    form = {"format": {"type": "json_schema", "name": "pet", "schema": SCHEMA, "strict": True}}
    pet = client.responses.create(model=model, input=PROMPT, text=form, extra_body={"seed": 1})
    assert json.loads(pet.output_text)["kind"] in ("cat", "dog") and pet.status == "completed", pet
    try:
        client.responses.create(**ask, input=PROMPT, previous_response_id=whole.id)
        raise AssertionError("a response that was deleted was continued")
    except openai.BadRequestError as error:
        assert error.code == "previous_response_not_found" and error.param == "previous_response_id", error


def of_prompt(usage):
    """All tokens of a prompt: those that were known already are apart."""
    return usage.input_tokens + usage.cache_read_input_tokens


def with_anthropic(base, model, text):
    client = anthropic.Anthropic(base_url=base, api_key="unused", max_retries=0)
    ask = {"model": model, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": TOKENS}
    # The package names no temperature any more; the API's other clients do.
    ask["extra_body"] = {"temperature": 0}
    whole = client.messages.create(**ask)
    assert whole.content[0].text == text, whole
    assert whole.stop_reason == "max_tokens" and whole.usage.output_tokens == TOKENS
    with client.messages.stream(**ask) as stream:
        assert "".join(stream.text_stream) == text
        final = stream.get_final_message()
    assert final.content[0].text == text and final.usage.output_tokens == TOKENS, final
    counted = client.messages.count_tokens(model=model, messages=ask["messages"])
    assert counted.input_tokens == of_prompt(whole.usage)
    tools = [{"name": "buy", "description": "Buys a pet.", "input_schema": SCHEMA}]
    demand = {"model": model, "max_tokens": 500, "tools": tools, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    asked = [{"role": "user", "content": PROMPT}]
    with client.messages.stream(**demand, messages=asked, extra_body={"top_k": 1}) as stream:
        called = stream.get_final_message()
    (block,) = called.content
    assert called.stop_reason == "tool_use" and block.type == "tool_use" and block.input["kind"] in ("cat", "dog"), called
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "sold"}
    asked += [{"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
    again = client.messages.create(**demand, messages=asked, extra_body={"top_k": 1})
    assert of_prompt(again.usage) > of_prompt(called.usage), again
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    pet = client.messages.create(**{**ask, "max_tokens": 500}, output_config=form)
    assert json.loads(pet.content[0].text)["kind"] in ("cat", "dog") and pet.stop_reason == "end_turn", pet
    try:
        client.messages.create(**{**ask, "model": "none"})
        raise AssertionError("an unknown model was answered")
    except anthropic.NotFoundError as error:
        assert "none" in str(error), error


def with_ollama(base, model, text):
    client = ollama.Client(host=base)
    assert model in [one.model for one in client.list().models]
    options = {"temperature": 0, "num_predict": TOKENS}
    messages = [{"role": "user", "content": PROMPT}]
    vectors = client.embed(model=model, input=["ab", "ba"]).embeddings
    assert vectors[1] == client.embed(model=model, input="ba").embeddings[0] and vectors[0] != vectors[1]
    assert len(client.embeddings(model=model, prompt="ab").embedding) == len(vectors[0])
    whole = client.chat(model=model, messages=messages, options=options)
    assert whole.message.content == text and whole.done_reason == "length", whole
    assert whole.eval_count == TOKENS
    pieces = list(client.chat(model=model, messages=messages, options=options, stream=True))
    assert "".join(piece.message.content for piece in pieces) == text and pieces[-1].done
    assert client.generate(model=model, prompt=PROMPT, options=options).response == text
    pet = client.chat(model=model, messages=messages, format=SCHEMA, options={"seed": 1, "repeat_penalty": 1.1})
    assert json.loads(pet.message.content)["kind"] in ("cat", "dog") and pet.done_reason == "stop", pet
    used = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "buy", "arguments": {"kind": "cat"}}}]}
    talk = [*messages, used, {"role": "tool", "tool_name": "buy", "content": "sold"}]
    after = client.chat(model=model, messages=talk, tools=TOOLS, options=options)
    assert after.eval_count == TOKENS and after.prompt_eval_count > whole.prompt_eval_count, after
    assert "tools" in client.show(model).capabilities
    assert client.show(model).details.format == "gguf"
    assert model in [one.model for one in client.ps().models]
    for failing in [lambda: client.chat(model="none", messages=messages), lambda: client.pull("any")]:
        try:
            failing()
            raise AssertionError("it was answered")
        except ollama.ResponseError as error:
            assert error.status_code in (404, 501), error


def with_prometheus(base, _model, _text):
    page = urllib.request.urlopen(f"{base}/metrics").read().decode()
    families = {family.name: family for family in text_string_to_metric_families(page)}
    requests = {(s.labels["api"], s.labels["status"]): s.value for s in families["rocmforge_gateway_requests"].samples}
    assert requests["openai", "404"] == 3 and requests["anthropic", "404"] == 1 and requests["ollama", "501"] == 1, page
    histogram = families["rocmforge_gateway_first_byte_seconds"]
    counts = [s.value for s in histogram.samples if s.name.endswith("_bucket")]
    assert families["rocmforge_gateway_daemon_up"].samples[0].value == 1, page
    # Endpoint pickers of Kubernetes' inference extension ask for these, and take the first series of each.
    for name in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc", "gpu_cache_usage_perc"):
        family = families[f"vllm:{name}"]
        assert family.type == "gauge" and [(s.labels, s.value) for s in family.samples] == [({}, 0)], page
    cache = families["vllm:cache_config_info"].samples
    assert len(cache) == 1 and int(cache[0].labels["block_size"]) > 0 and int(cache[0].labels["num_gpu_blocks"]) > 0, page
    assert histogram.type == "histogram" and counts == sorted(counts) and counts[-1] > 0, page


def main():
    base, model, text = sys.argv[1:]
    text = json.loads(text)
    packages = {
        "openai": with_openai,
        "anthropic": with_anthropic,
        "ollama": with_ollama,
        "prometheus-client": with_prometheus,
    }
    for name, run in packages.items():
        run(base, model, text)
        print(name, version(name))


main()
