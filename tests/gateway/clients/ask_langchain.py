"""LangChain's package for OpenAI's API talks to the gateway at the address of the first argument.

The second argument is a model with a chat template, the third the text, in JSON, that it answers to PROMPT within eight
tokens at temperature 0. Prints the packages' versions; a failed assertion is a failure.
"""

import asyncio
import json
import sys
from importlib.metadata import version
from typing import Literal

from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

PROMPT = "ab"
TOKENS = 8


class Pet(BaseModel):
    """A pet to buy."""

    kind: Literal["cat", "dog"] = Field(description="The kind of pet.")


def main():
    base, model, text = sys.argv[1:]
    text = json.loads(text)
    server = {"base_url": f"{base}/v1", "api_key": "unused", "max_retries": 0, "model": model}
    for responses in (False, True):
        chat(server, text, responses)
    asyncio.run(chat_async(server, text))
    completion = OpenAI(**server, temperature=0, max_tokens=TOKENS).invoke(PROMPT)
    assert completion == "".join(OpenAI(**server, temperature=0, max_tokens=TOKENS).stream(PROMPT)), completion
    # The package would count tokens with the service's own tokenizer, which it downloads.
    embeddings = OpenAIEmbeddings(**server, check_embedding_ctx_length=False)
    many = embeddings.embed_documents(["ab", "ba"])
    assert len(many) == 2 and many[1] == embeddings.embed_query("ba"), many
    print("langchain-openai", version("langchain-openai"))


async def chat_async(server, text):
    for responses in (False, True):
        llm = ChatOpenAI(**server, temperature=0, max_tokens=TOKENS, use_responses_api=responses)
        assert (await llm.ainvoke(PROMPT)).text == text
        assert "".join([piece.text async for piece in llm.astream(PROMPT)]) == text


def chat(server, text, responses):
    llm = ChatOpenAI(**server, temperature=0, max_tokens=TOKENS, use_responses_api=responses)
    whole = llm.invoke(PROMPT)
    assert whole.text == text and whole.usage_metadata["output_tokens"] == TOKENS, whole
    pieces = list(llm.stream(PROMPT))
    assert "".join(piece.text for piece in pieces) == text, pieces
    assert [one.text for one in llm.batch([PROMPT, PROMPT])] == [text, text]
    chain = ChatPromptTemplate.from_messages([("system", "{mood}"), ("human", "{word}")]) | llm
    assert chain.invoke({"mood": "be good", "word": PROMPT}).usage_metadata["input_tokens"] > whole.usage_metadata["input_tokens"]
    seeded = ChatOpenAI(**server, use_responses_api=responses, extra_body={"seed": 1})
    caller = seeded.bind_tools([Pet], tool_choice="Pet", parallel_tool_calls=False)
    asked = [SystemMessage("be good"), HumanMessage(PROMPT)]
    called = caller.invoke(asked)
    (call,) = called.tool_calls
    assert call["name"] == "Pet" and call["args"]["kind"] in ("cat", "dog"), called
    talk = [*asked, called, ToolMessage("sold", tool_call_id=call["id"])]
    after = llm.bind_tools([Pet]).invoke(talk)
    assert after.usage_metadata["input_tokens"] > called.usage_metadata["input_tokens"], after
    for method in ("json_schema", "function_calling"):
        pet = seeded.with_structured_output(Pet, method=method).invoke(PROMPT)
        assert pet.kind in ("cat", "dog"), pet


main()
