"""LlamaIndex's packages for servers of OpenAI's API talk to the gateway at the address of the first argument.

The second argument is a model with a chat template, the third the text, in JSON, that it answers to PROMPT within eight
tokens at temperature 0. Prints the packages' versions; a failed assertion is a failure.
"""

import asyncio
import json
import sys
from importlib.metadata import version
from typing import Literal

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike

PROMPT = "ab"
TOKENS = 8


def buy(kind: Literal["cat", "dog"]) -> str:
    """Buys a pet."""
    return "sold"


def main():
    base, model, text = sys.argv[1:]
    text = json.loads(text)
    server = {"model": model, "api_base": f"{base}/v1", "api_key": "unused", "max_retries": 0}
    abilities = {"is_chat_model": True, "is_function_calling_model": True, "context_window": 2048}
    llm = OpenAILike(**server, **abilities, temperature=0, max_tokens=TOKENS)
    asked = [ChatMessage(role="user", content=PROMPT)]
    whole = llm.chat(asked)
    assert whole.message.content == text, whole
    assert "".join(piece.delta or "" for piece in llm.stream_chat(asked)) == text
    assert asyncio.run(llm.achat(asked)).message.content == text
    bare = OpenAILike(**server, is_chat_model=False, context_window=2048, temperature=0, max_tokens=TOKENS)
    completion = bare.complete(PROMPT).text
    assert "".join(piece.delta or "" for piece in bare.stream_complete(PROMPT)) == completion
    caller = OpenAILike(**server, **abilities, max_tokens=500, additional_kwargs={"seed": 1})
    tool = FunctionTool.from_defaults(fn=buy)
    called = caller.chat_with_tools([tool], user_msg=PROMPT, tool_required=True)
    (call,) = caller.get_tool_calls_from_response(called)
    assert call.tool_name == "buy" and call.tool_kwargs["kind"] in ("cat", "dog"), called
    result = ChatMessage(role="tool", content=buy("cat"), additional_kwargs={"tool_call_id": call.tool_id})
    after = llm.chat_with_tools([tool], chat_history=[*asked, called.message, result])
    assert after.raw.usage.prompt_tokens > called.raw.usage.prompt_tokens, after
    embedding = OpenAILikeEmbedding(model_name=model, api_base=f"{base}/v1", api_key="unused", max_retries=0)
    many = embedding.get_text_embedding_batch(["ab", "ba"])
    assert len(many) == 2 and many[1] == embedding.get_text_embedding("ba"), many
    for package in ("llama-index-llms-openai-like", "llama-index-embeddings-openai-like"):
        print(package, version(package))


main()
