"""A real OpenAI-compatible HTTP server on loopback, over any batch policy; for tests and benchmarks."""

from __future__ import annotations

import asyncio
import hashlib
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from mas_gym.policies import load_policy
from mas_gym.policies.base import Certainty, Policy, Sample, SamplingReply, SamplingRequest
from mas_gym.policies.batch_queue import as_policy
from mas_gym.policies.scripted import ScriptedPolicy
from mas_gym.systems.prompts import ChatMessage


def hash_policy() -> ScriptedPolicy:
    """An agent whose message is a pure function of prompt and seed: instant, and any mix-up shows."""

    def script(request: SamplingRequest, seed: int) -> Sample:
        word = hashlib.blake2b(f"{request.messages}|{seed}".encode(), digest_size=6).hexdigest()
        logprob = -1.5 - seed % 3
        return Sample(f"I say {word}. Final Answer: {int(word, 16) % 5}", 7, logprob, "stop", Certainty(logprob / 7))

    return ScriptedPolicy(script, name="hash", max_batch=64)


def make_app(
    policy: Policy,
    refuses: frozenset[str] = frozenset(),
    window: int = 10**6,
    longest: int = 10**6,
    whole: bool = False,
) -> FastAPI:
    """Serve ``policy``; parameters in ``refuses`` get a 400, and with ``n`` in it every reply has one choice.

    With ``whole``, the prompt and the longest requested message must fit the window.
    """
    app = FastAPI()
    engine = as_policy(policy)
    app.state.bodies = []

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": "served", "object": "model", "max_model_len": window}]}

    @app.post("/v1/chat/completions")
    @app.post("/v1/completions")
    async def complete(request: Request) -> Any:
        body = await request.json()
        app.state.bodies.append(body)
        if body["model"] != "served":
            return _error(404, f"The model `{body['model']}` does not exist.")
        for name in sorted(refuses - {"n"}):
            if name in body:
                return _error(400, f"Unsupported parameter: '{name}' is not supported with this model.", name)
        cap = body.get("max_tokens") or body["max_completion_tokens"]
        if cap > longest:
            text = f"max_tokens is too large: {cap}. This model supports at most {longest} completion tokens, whereas "
            text += f"you provided {cap}."
            return _error(400, text, "max_tokens")
        chat = "messages" in body
        messages = [(m["role"], m["content"]) for m in body["messages"]] if chat else [("user", body["prompt"])]
        length = sum(len(text.split()) for _, text in messages)
        if length > window:
            text = f"This model's maximum context length is {window} tokens. However, your request has {length} input"
            return _error(400, text + " tokens. Please reduce the length of the input messages.")
        if whole and length + cap > window:
            text = (
                f"This model's maximum context length is {window} tokens. However, you requested {length + cap} tokens "
            )
            text += f"({length} in the messages, {cap} in the completion). "
            return _error(400, text + "Please reduce the length of the messages or completion.")
        n = 1 if "n" in refuses else body.get("n", 1)
        wanted = SamplingRequest(
            tuple(ChatMessage(role, text) for role, text in messages),
            tuple(body.get("seed", 0) + i for i in range(n)),
            cap,
            body.get("temperature", 1.0),
            body.get("top_p", 1.0),
            traced=bool(body.get("return_token_ids")),
        )
        return render(
            await engine.sample_async(wanted), chat, bool(body.get("logprobs")) and "logprobs-silently" not in refuses
        )

    return app


def render(reply: SamplingReply, chat: bool, logprobs: bool) -> dict[str, Any]:
    choices: list[dict[str, Any]] = []
    for index, sample in enumerate(reply.samples):
        # Without traces the policy reports only the sum; spread over the tokens, the sum stays equal.
        each = [(sample.logprob or 0.0) / max(sample.tokens, 1)] * sample.tokens
        choice: dict[str, Any] = {"index": index, "finish_reason": sample.finish_reason, "logprobs": None}
        if sample.trace is not None:
            each, choice["token_ids"] = list(sample.trace.logprobs), sample.trace.completion
        if chat:
            choice["message"] = {"role": "assistant", "content": sample.text}
            content = [{"token": "", "bytes": None, "top_logprobs": [], "logprob": value} for value in each]
            choice["logprobs"] = {"content": content} if logprobs else None
        else:
            choice["text"] = sample.text
            choice["logprobs"] = {"token_logprobs": each} if logprobs else None
        choices.append(choice)
    generated = sum(sample.tokens for sample in reply.samples)
    usage = {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": generated,
        "total_tokens": reply.prompt_tokens + generated,
        "prompt_tokens_details": {"cached_tokens": reply.cached_tokens},
    }
    kind = "chat.completion" if chat else "text_completion"
    body = {"id": "x", "object": kind, "created": 0, "model": "served", "choices": choices, "usage": usage}
    if (trace := reply.samples[0].trace) is not None:
        # vLLM returns the prompt's ids next to the choices of a chat, and in each choice of a completion.
        for part in [body] if chat else choices:
            part["prompt_token_ids"] = trace.prompt
    return body


def _error(status: int, message: str, param: str | None = None) -> JSONResponse:
    error = {"message": message, "type": "BadRequestError", "param": param, "code": status}
    return JSONResponse({"error": error}, status)


@contextmanager
def serving(app: FastAPI, port: int = 0, **options: Any) -> Iterator[str]:
    """Run an app on a thread, with further options of uvicorn's; yields its base URL without a path."""
    options = {"log_level": "error", "timeout_graceful_shutdown": 1, **options}
    config = uvicorn.Config(app, host="127.0.0.1", port=port, **options)
    server = uvicorn.Server(config)
    ready = threading.Event()

    async def run() -> None:
        task = asyncio.create_task(server.serve())
        while not server.started and not task.done():
            await asyncio.sleep(0.01)
        ready.set()
        await task

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    assert ready.wait(30) and server.started
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(15)
        assert not thread.is_alive()


def main() -> None:
    """Serve ``hash`` or the tiny model on a port: ``python loopback.py hash 8123``."""
    name, port = sys.argv[1:]
    policy: Any = hash_policy() if name == "hash" else load_policy(name)
    uvicorn.run(make_app(policy), host="127.0.0.1", port=int(port), log_level="error")


if __name__ == "__main__":
    main()
