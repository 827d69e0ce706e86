"""OpenAI's package for agents and Pydantic's talk to the gateway at the address of the first argument.

The second argument is a model with a chat template, the third the text, in JSON, that it answers to PROMPT within eight
tokens at temperature 0. Prints the packages' versions; a failed assertion is a failure.
"""

import asyncio
import json
import sys
from importlib.metadata import version
from typing import Literal

import agents
import openai
import pydantic_ai
from pydantic import BaseModel
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

PROMPT = "ab"
TOKENS = 8


class Pet(BaseModel):
    """A pet to buy."""

    kind: Literal["cat", "dog"]


@agents.function_tool
def buy(kind: Literal["cat", "dog"]) -> str:
    """Buys a pet."""
    return f"sold a {kind}"


async def with_agents(base, model, _text):
    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="unused", max_retries=0)
    # The package takes an answer that was cut for a failure, so a grammar ends it.
    ends = agents.ModelSettings(extra_body={"grammar": 'root ::= "yes"'})
    seeded = agents.ModelSettings(tool_choice="required", parallel_tool_calls=False, extra_body={"seed": 1})
    for kind in (agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel):
        served = kind(model=model, openai_client=client)
        plain = agents.Agent(name="plain", model=served, model_settings=ends)
        whole = await agents.Runner.run(plain, PROMPT)
        assert whole.final_output == "yes", whole
        streamed = agents.Runner.run_streamed(plain, PROMPT)
        pieces = [event async for event in streamed.stream_events()]
        assert streamed.final_output == "yes" and len(pieces) > 2, pieces
        caller = agents.Agent(name="caller", model=served, tools=[buy], model_settings=seeded, tool_use_behavior="stop_on_first_tool")
        called = await agents.Runner.run(caller, PROMPT)
        assert called.final_output in ("sold a cat", "sold a dog"), called
        # The call and its result go back.
        after = await agents.Runner.run(plain, [*called.to_input_list(), {"role": "user", "content": PROMPT}])
        assert after.final_output == "yes", after
        assert after.context_wrapper.usage.input_tokens > whole.context_wrapper.usage.input_tokens, after
        formed = agents.Agent(name="formed", model=served, output_type=Pet, model_settings=agents.ModelSettings(extra_body={"seed": 1}))
        assert (await agents.Runner.run(formed, PROMPT)).final_output.kind in ("cat", "dog")
    plain = agents.Agent(name="plain", model=agents.OpenAIResponsesModel(model=model, openai_client=client), model_settings=ends)
    first = await agents.Runner.run(plain, PROMPT)
    second = await agents.Runner.run(plain, PROMPT, previous_response_id=first.last_response_id)
    usage = [run.context_wrapper.usage.input_tokens for run in (first, second)]
    assert usage[1] > usage[0], usage


async def with_pydantic(base, model, text):
    openais = OpenAIProvider(base_url=f"{base}/v1", api_key="unused")
    anthropics = AnthropicProvider(base_url=base, api_key="unused")
    models = [OpenAIChatModel(model, provider=openais), OpenAIResponsesModel(model, provider=openais), AnthropicModel(model, provider=anthropics)]
    for served in models:
        settings = {"max_tokens": TOKENS, "extra_body": {"temperature": 0}}
        plain = pydantic_ai.Agent(served, model_settings=settings)
        whole = await plain.run(PROMPT)
        assert whole.output == text, whole
        async with plain.run_stream(PROMPT) as stream:
            assert await stream.get_output() == text
        more = await plain.run(PROMPT, message_history=whole.all_messages())
        assert more.usage.input_tokens > whole.usage.input_tokens, more
        if isinstance(served, AnthropicModel):
            continue  # This API takes no seed, and without one a call of so small a model may not end.
        settings = {"max_tokens": 500, "parallel_tool_calls": False, "extra_body": {"seed": 1}}
        formed = pydantic_ai.Agent(served, output_type=Pet, model_settings=settings)
        assert (await formed.run(PROMPT)).output.kind in ("cat", "dog")


def main():
    base, model, text = sys.argv[1:]
    text = json.loads(text)
    asyncio.run(with_agents(base, model, text))
    print("openai-agents", version("openai-agents"))
    asyncio.run(with_pydantic(base, model, text))
    print("pydantic-ai-slim[openai,anthropic]", version("pydantic-ai-slim"))


main()
