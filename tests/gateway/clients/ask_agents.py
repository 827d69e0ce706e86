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
SHORT = {"temperature": 0, "max_tokens": TOKENS}


class Pet(BaseModel):
    """A pet to buy."""

    kind: Literal["cat", "dog"]


@agents.function_tool
def buy(kind: Literal["cat", "dog"]) -> str:
    """Buys a pet."""
    return f"sold a {kind}"


async def with_agents(base, model, text):
    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="unused", max_retries=0)
    for kind in (agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel):
        served = kind(model=model, openai_client=client)
        plain = agents.Agent(name="plain", model=served, model_settings=agents.ModelSettings(**SHORT))
        whole = await agents.Runner.run(plain, PROMPT)
        assert whole.final_output == text, whole
        streamed = agents.Runner.run_streamed(plain, PROMPT)
        pieces = [event async for event in streamed.stream_events()]
        assert streamed.final_output == text and len(pieces) > 2, pieces
        # A call that is demanded, its result, and the answer after it.
        settings = agents.ModelSettings(tool_choice="required", parallel_tool_calls=False, max_tokens=200, extra_body={"seed": 1})
        caller = agents.Agent(name="caller", model=served, tools=[buy], model_settings=settings, tool_use_behavior="run_llm_again")
        called = await agents.Runner.run(caller, PROMPT, max_turns=3)
        results = [item.output for item in called.new_items if item.type == "tool_call_output_item"]
        assert results and results[0] in ("sold a cat", "sold a dog"), called
        formed = agents.Agent(name="formed", model=served, output_type=Pet, model_settings=agents.ModelSettings(extra_body={"seed": 1}))
        assert (await agents.Runner.run(formed, PROMPT)).final_output.kind in ("cat", "dog")
    served = agents.OpenAIResponsesModel(model=model, openai_client=client)
    plain = agents.Agent(name="plain", model=served, model_settings=agents.ModelSettings(**SHORT))
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
        seed = {"top_k": 1} if isinstance(served, AnthropicModel) else {"seed": 1}
        formed = pydantic_ai.Agent(served, output_type=Pet, model_settings={"max_tokens": 500, "extra_body": seed})
        assert (await formed.run(PROMPT)).output.kind in ("cat", "dog")


def main():
    base, model, text = sys.argv[1:]
    text = json.loads(text)
    asyncio.run(with_agents(base, model, text))
    print("openai-agents", version("openai-agents"))
    asyncio.run(with_pydantic(base, model, text))
    print("pydantic-ai-slim[openai,anthropic]", version("pydantic-ai-slim"))


main()
