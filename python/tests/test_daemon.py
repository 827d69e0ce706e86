"""Both clients before a real daemon. `tests/scenario/python.rs` starts it, and says what the Rust client was answered.

`ROCMFORGE_SOCKET` is the daemon's socket and `ROCMFORGE_EXPECTED` a file of JSON, with all answers at temperature 0.
"""

from __future__ import annotations

import asyncio
import gc
import json
import math
import os
import tempfile
import threading
import time
import unittest
from pathlib import Path
from typing import Any

import rocmforge
from rocmforge import AsyncClient, Client, errors, messages

EXPECTED: dict[str, Any] = json.loads(Path(os.environ["ROCMFORGE_EXPECTED"]).read_text("utf-8"))
CHATTY, ENDLESS, RANKER, TINY = EXPECTED["chatty"], EXPECTED["endless"], EXPECTED["ranker"], EXPECTED["tiny"]
PROMPT, TOKENS = EXPECTED["prompt"], EXPECTED["tokens"]
PATIENCE = 60.0
SCHEMA = {"type": "object", "properties": {"kind": {"enum": ["cat", "dog"]}}, "required": ["kind"], "additionalProperties": False}


def idle(client: Client) -> bool:
    device = client.status().devices[0]
    return device.sequences_running == device.sequences_queued == 0


class Synchronous(unittest.TestCase):
    def setUp(self) -> None:
        self.client = Client()
        self.addCleanup(self.client.close)

    def await_idle(self) -> None:
        until = time.monotonic() + PATIENCE
        while not idle(self.client):
            self.assertLess(time.monotonic(), until, "a request still runs")
            time.sleep(0.01)

    def test_answers_are_those_that_the_rust_client_gets(self) -> None:
        client = self.client
        chat = client.chat(CHATTY, PROMPT, temperature=0, max_tokens=TOKENS)
        pieces = list(chat)
        self.assertEqual("".join(pieces), EXPECTED["chat"]["text"])
        self.assertGreater(len(pieces), 1)
        self.assertEqual((chat.ids, chat.prompt_ids), (EXPECTED["chat"]["ids"], EXPECTED["chat"]["prompt_ids"]))
        assert chat.end is not None
        self.assertEqual(chat.end.stop_reason, messages.StopReason.MAX_TOKENS)
        self.assertEqual(chat.end.usage.generated_tokens, TOKENS)
        messages_of = [{"role": "user", "content": PROMPT}]
        self.assertEqual(client.chat(CHATTY, messages_of, temperature=0, max_tokens=TOKENS).text(), "".join(pieces))
        story = client.complete(TINY, PROMPT, temperature=0, max_tokens=TOKENS, ignore_eog=True)
        self.assertEqual(story.text(), EXPECTED["story"])
        self.assertEqual(client.complete(TINY, story.prompt_ids, temperature=0, max_tokens=TOKENS, ignore_eog=True).text(), EXPECTED["story"])

    def test_tokens_scores_and_embeddings_are_those_that_the_rust_client_gets(self) -> None:
        client = self.client
        self.assertEqual(client.tokenize(TINY, PROMPT), EXPECTED["token_ids"])
        self.assertEqual(client.detokenize(TINY, EXPECTED["token_ids"]).strip(), PROMPT)
        score = client.score(TINY, PROMPT, top_logprobs=2)
        self.assertEqual(score.ids, EXPECTED["token_ids"])
        self.assertEqual([one.logprob for one in score.logprobs], EXPECTED["logprobs"])
        self.assertEqual([len(one.top) for one in score.logprobs], [2] * len(score.logprobs))
        self.assertAlmostEqual(score.perplexity or 0.0, math.exp(-sum(EXPECTED["logprobs"]) / len(EXPECTED["logprobs"])))
        self.assertEqual(client.embed(TINY, PROMPT), EXPECTED["embedding"])
        raw = client.embed(TINY, PROMPT, pooling="mean", normalise=False)
        self.assertEqual(raw, EXPECTED["raw_embedding"])
        self.assertEqual(client.rank(RANKER, PROMPT, EXPECTED["documents"]), EXPECTED["relevances"])
        with self.assertRaises(errors.ServerError) as refused:
            client.rank(TINY, PROMPT, EXPECTED["documents"])
        self.assertIn("no classifier", refused.exception.message)

    def test_models_and_state_of_the_daemon(self) -> None:
        client = self.client
        names = [model.name for model in client.models()]
        self.assertEqual(names, sorted([CHATTY, ENDLESS, RANKER, TINY]))
        self.assertEqual(client.ping(b"echo"), b"echo")
        self.assertEqual(client.status().pid, EXPECTED["pid"])
        self.assertEqual(client.show(TINY).summary.name, TINY)
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder, "copy.gguf")
            copy.write_bytes(Path(EXPECTED["tiny_path"]).read_bytes())
            self.assertEqual(client.load_file(copy).summary.name, "copy")
            self.assertEqual(client.complete("copy", PROMPT, temperature=0, max_tokens=TOKENS, ignore_eog=True).text(), EXPECTED["story"])
            self.assertTrue(client.unload("copy").was_mapped)
            with self.assertRaises(errors.InvalidRequest):
                client.load_file(folder)
        self.assertEqual(client.load(TINY).summary.state, messages.ModelState.MAPPED)

    def test_options_change_what_is_drawn(self) -> None:
        def said(**options: Any) -> str:
            return self.client.complete(TINY, PROMPT, **{"temperature": 0, "max_tokens": 60, **options}).text()

        plain = said()
        schema = json.loads(self.client.chat(CHATTY, PROMPT, schema=SCHEMA, seed=1).text())
        self.assertIn(schema["kind"], ("cat", "dog"))
        self.assertIn(said(regex="(red|blue)"), ("red", "blue"))
        self.assertEqual(said(gbnf='root ::= "yes"'), "yes")
        self.assertEqual(said(lark='start: "no"'), "no")
        end = plain.index(" ", 10)
        self.assertEqual(said(stop=[plain[end : end + 4]]), plain[:end])
        self.assertNotEqual(said(repeat_penalty=2.0), plain)
        self.assertNotEqual(said(dry_multiplier=5.0, dry_allowed_length=1), plain)
        whole = self.client.complete(TINY, PROMPT, temperature=0, max_tokens=60)
        self.assertEqual(whole.text(), plain)
        self.assertNotEqual(said(logit_bias={whole.ids[0]: -100.0}), plain)
        first = said(temperature=1.0, seed=3)
        self.assertEqual(first, said(temperature=1.0, seed=3))
        with self.client.complete(TINY, PROMPT, session="python", temperature=0, max_tokens=4) as turn:
            turn.text()
            self.assertEqual(turn.prompt_ids, EXPECTED["token_ids"])
        longer = self.client.complete(TINY, " and", session="python", temperature=0, max_tokens=4)
        longer.text()
        self.assertGreater(len(longer.prompt_ids), len(EXPECTED["token_ids"]) + 4)

    def test_errors_are_the_daemons(self) -> None:
        for code, kind in [(301, errors.CapacityError), (204, errors.RequestError), (501, errors.DeviceError), (100, errors.ServerError)]:
            with self.assertRaises(kind) as raised:
                self.client.fail(code)
            self.assertEqual((raised.exception.code, raised.exception.name), (code, messages.NAMES[code]))
        with self.assertRaises(errors.ModelNotFound) as missing:
            self.client.complete("none", "text").text()
        self.assertIn("none", missing.exception.message)
        with self.assertRaises(errors.RequestError) as wrong:
            self.client.complete(TINY, "text", temperature=-1).text()
        self.assertEqual(wrong.exception.code, messages.ErrorCode.INVALID_ARGUMENT)
        with self.assertRaises(errors.InvalidRequest):
            self.client.complete(TINY, "x" * 2_000_000)
        with self.assertRaises(errors.InvalidRequest):
            self.client.complete(TINY, "text", temprature=0)  # type: ignore[call-arg]
        self.assertEqual(self.client.ping(), b"")

    def test_closing_or_dropping_an_answer_cancels_it(self) -> None:
        answer = self.client.chat(ENDLESS, PROMPT, temperature=0)
        next(answer)
        answer.close()
        self.assertEqual(list(answer), [])
        self.await_idle()
        with self.client.chat(ENDLESS, PROMPT, temperature=0) as answer:
            next(answer)
        self.await_idle()
        answer = self.client.chat(ENDLESS, PROMPT, temperature=0)
        next(answer)
        del answer
        gc.collect()
        self.await_idle()
        with self.assertRaises(errors.RequestError) as late:
            self.client.chat(ENDLESS, PROMPT, temperature=0, timeout=0.05).text()
        self.assertEqual(late.exception.code, messages.ErrorCode.DEADLINE_EXCEEDED)

    def test_threads_share_a_connection(self) -> None:
        found: list[str] = []

        def ask() -> None:
            found.append(self.client.complete(TINY, PROMPT, temperature=0, max_tokens=TOKENS, ignore_eog=True).text())

        with self.client.chat(ENDLESS, PROMPT, temperature=0) as endless:
            next(endless)
            threads = [threading.Thread(target=ask) for _ in range(12)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for _ in range(100):
                next(endless)
        self.assertEqual(found, [EXPECTED["story"]] * 12)

    def test_a_closed_client_connects_again(self) -> None:
        answer = self.client.chat(ENDLESS, PROMPT, temperature=0)
        next(answer)
        self.client.close()
        with self.assertRaises(errors.Disconnected):
            list(answer)
        self.assertEqual(self.client.ping(b"again"), b"again")
        # The daemon's end of a connection that was lost: a call is repeated on another one.
        self.client.connection().peer.shutdown(2)
        self.assertEqual(self.client.ping(b"repeated"), b"repeated")

    def test_a_missing_or_foreign_daemon_is_named(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            with self.assertRaisesRegex(errors.Unavailable, "is rocmforged running"):
                Client(f"{folder}/none").ping()
        with self.assertRaisesRegex(errors.UntrustedServer, "no request was sent"):
            Client(server_uids=[4_294_967_000]).ping()
        with self.assertRaises(errors.InvalidRequest):
            Client("x" * 108)
        with self.assertRaises(errors.Unavailable):
            asyncio.run(AsyncClient("/nonexistent/socket").ping())


class Asynchronous(unittest.IsolatedAsyncioTestCase):
    async def asyncSetUp(self) -> None:
        self.client = AsyncClient()

    async def asyncTearDown(self) -> None:
        await self.client.close()

    async def await_idle(self) -> None:
        async with asyncio.timeout(PATIENCE):
            while True:
                device = (await self.client.status()).devices[0]
                if device.sequences_running == device.sequences_queued == 0:
                    return
                await asyncio.sleep(0.01)

    async def test_answers_are_those_that_the_rust_client_gets(self) -> None:
        client = self.client
        chat = await client.chat(CHATTY, PROMPT, temperature=0, max_tokens=TOKENS)
        pieces = [piece async for piece in chat]
        self.assertEqual("".join(pieces), EXPECTED["chat"]["text"])
        self.assertEqual((chat.ids, chat.prompt_ids), (EXPECTED["chat"]["ids"], EXPECTED["chat"]["prompt_ids"]))

        async def story() -> str:
            answer = await client.complete(TINY, PROMPT, temperature=0, max_tokens=TOKENS, ignore_eog=True)
            return await answer.text()

        self.assertEqual(await asyncio.gather(*(story() for _ in range(12))), [EXPECTED["story"]] * 12)
        self.assertEqual(await client.tokenize(TINY, PROMPT), EXPECTED["token_ids"])
        self.assertEqual((await client.detokenize(TINY, EXPECTED["token_ids"])).strip(), PROMPT)
        score = await client.score(TINY, PROMPT)
        self.assertEqual([one.logprob for one in score.logprobs], EXPECTED["logprobs"])
        self.assertEqual(await client.embed(TINY, PROMPT), EXPECTED["embedding"])
        self.assertEqual(await client.rank(RANKER, PROMPT, EXPECTED["documents"]), EXPECTED["relevances"])
        self.assertEqual([model.name for model in await client.models()], sorted([CHATTY, ENDLESS, RANKER, TINY]))
        self.assertEqual(await client.ping(b"echo"), b"echo")
        self.assertEqual((await client.show(TINY)).summary.name, TINY)
        self.assertEqual((await client.load_file(EXPECTED["tiny_path"], "passed")).summary.name, "passed")
        self.assertTrue((await client.unload("passed")).was_mapped)
        self.assertEqual((await client.load(TINY)).summary.name, TINY)

    async def test_errors_are_the_daemons(self) -> None:
        with self.assertRaises(errors.CapacityError):
            await self.client.fail(300)
        with self.assertRaises(errors.ModelNotFound):
            await (await self.client.complete("none", "text")).text()
        with self.assertRaises(rocmforge.InvalidRequest):
            await self.client.complete(TINY, "x" * 2_000_000)

    async def test_a_closed_answer_and_a_cancelled_task_cancel_their_requests(self) -> None:
        async with await self.client.chat(ENDLESS, PROMPT, temperature=0) as answer:
            await anext(answer)
        await self.await_idle()
        begun = asyncio.Event()

        async def endless() -> None:
            async for _ in await self.client.chat(ENDLESS, PROMPT, temperature=0):
                begun.set()

        task = asyncio.create_task(endless())
        async with asyncio.timeout(PATIENCE):
            await begun.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        self.assertTrue(task.cancelled())
        await self.await_idle()

    async def test_a_closed_client_connects_again(self) -> None:
        answer = await self.client.chat(ENDLESS, PROMPT, temperature=0)
        await anext(answer)
        await self.client.close()
        with self.assertRaises(errors.Disconnected):
            await answer.text()
        self.assertEqual(await self.client.ping(b"again"), b"again")
        (await self.client.connection()).peer.shutdown(2)
        self.assertEqual(await self.client.ping(b"repeated"), b"repeated")


if __name__ == "__main__":
    unittest.main()
