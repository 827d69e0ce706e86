"""LiteLLM talks to the gateway at the address of the first argument, in each of the gateway's APIs.

The second argument is a model with a chat template, the third the text, in JSON, that it answers to PROMPT within eight
tokens at temperature 0. Prints the package's version; a failed assertion is a failure.
"""

import json
import os
import sys
from importlib.metadata import version

# Otherwise the package downloads prices.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm

# Otherwise it prints advice beside each error.
litellm.suppress_debug_info = True
PROMPT = "ab"
TOKENS = 8
SCHEMA = {"type": "object", "properties": {"kind": {"enum": ["cat", "dog"]}}, "required": ["kind"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "buy", "description": "Buys a pet.", "parameters": SCHEMA}}]
MESSAGES = [{"role": "user", "content": PROMPT}]


def chat(route, base, text):
    server = {"model": route, "api_base": base, "api_key": "unused", "max_retries": 0}
    ask = {**server, "messages": MESSAGES, "temperature": 0, "max_tokens": TOKENS}
    whole = litellm.completion(**ask)
    assert whole.choices[0].message.content == text and whole.choices[0].finish_reason == "length", whole
    assert whole.usage.completion_tokens == TOKENS, whole
    pieces = list(litellm.completion(**ask, stream=True))
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == text, pieces
    try:
        litellm.completion(**{**ask, "model": route.rsplit("/", 1)[0] + "/none"})
        raise AssertionError("an unknown model was answered")
    except (litellm.NotFoundError, litellm.APIConnectionError) as error:
        assert "none" in str(error), error
    return server


def tools(server, **more):
    called = litellm.completion(**server, messages=MESSAGES, tools=TOOLS, tool_choice="required", max_tokens=500, **more)
    call = called.choices[0].message.tool_calls[0]
    assert call.function.name == "buy" and json.loads(call.function.arguments)["kind"] in ("cat", "dog"), called
    talk = [*MESSAGES, called.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "sold"}]
    after = litellm.completion(**server, messages=talk, tools=TOOLS, temperature=0, max_tokens=TOKENS)
    assert after.usage.prompt_tokens > called.usage.prompt_tokens, (called, after)


def main():
    base, model, text = sys.argv[1:]
    text = json.loads(text)
    server = chat(f"openai/{model}", f"{base}/v1", text)
    tools(server, seed=1)
    form = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA, "strict": True}}
    pet = litellm.completion(**server, messages=MESSAGES, seed=1, response_format=form)
    assert json.loads(pet.choices[0].message.content)["kind"] in ("cat", "dog"), pet
    vectors = litellm.embedding(**{**server, "input": ["ab", "ba"]})
    assert len(vectors.data) == 2, vectors
    completion = litellm.text_completion(**{**server, "model": f"text-completion-openai/{model}"}, prompt=PROMPT, max_tokens=TOKENS, temperature=0)
    assert completion.usage.completion_tokens == TOKENS, completion
    # The package asks for 16 tokens at least, as the service does.
    answer = litellm.responses(**server, input=PROMPT, temperature=0, max_output_tokens=16)
    assert answer.output[0].content[0].text.startswith(text) and answer.usage.output_tokens == 16, answer
    more = litellm.responses(**server, input=PROMPT, previous_response_id=answer.id, max_output_tokens=16)
    assert more.usage.input_tokens > answer.usage.input_tokens, more
    tools(chat(f"anthropic/{model}", base, text), top_k=1)
    chat(f"ollama_chat/{model}", base, text)
    print("litellm", version("litellm"))


main()
