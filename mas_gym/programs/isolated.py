"""Run a function program once in this process: ``python -m mas_gym.programs.isolated FILE.py:NAME``.

The question is read from standard input, and a JSON object with the answer or the error is written to standard output.
Output of the program itself is written to standard error.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any
from urllib.parse import urlsplit

from mas_gym.errors import need
from mas_gym.programs.execution import Ended, Failed
from mas_gym.programs.frameworks import name_nodes
from mas_gym.programs.program_kinds import PROGRAMS, FunctionSource, ended, failed
from mas_gym.programs.recorded_tools import use_gateway
from mas_gym.programs.worlds import WORLD_VARIABLE


def run(spec: str, question: str, base_url: str, api_key: str) -> Ended | Failed:
    """Return a function's answer or failure."""
    use_gateway(base_url, api_key)
    name_nodes(urlsplit(base_url).port)
    try:
        found = PROGRAMS.find(PROGRAMS.parse(spec))
        source = FunctionSource(found, world=WORLD_VARIABLE in os.environ)
        given: dict[str, Any] = {"base_url": base_url, "api_key": api_key}
        if "client" in source.named:
            given["client"] = _client(source.async_client, base_url, api_key)
        if WORLD_VARIABLE in os.environ:
            given["world"] = os.environ[WORLD_VARIABLE]
        answer = found(question, **{name: value for name, value in given.items() if name in source.named})
        return ended(asyncio.run(answer) if source.asynchronous else answer)
    except BaseException as error:
        return failed(error)


def _client(asynchronous: bool, base_url: str, api_key: str) -> Any:
    openai = need("openai", "a program with client=", "openai")
    kind = openai.AsyncOpenAI if asynchronous else openai.OpenAI
    return kind(base_url=base_url, api_key=api_key or "none", max_retries=0, timeout=None)


def main() -> None:
    """Run the program given on the command line."""
    question = sys.stdin.buffer.read().decode("utf-8", "replace")
    with os.fdopen(os.dup(1), "w", encoding="ascii") as output:
        os.dup2(2, 1)
        outcome = run(sys.argv[1], question, os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])
        output.write(json.dumps(outcome._asdict()))
        output.flush()
        # Leftover threads of the program do not delay the exit.
        os._exit(0)


if __name__ == "__main__":
    main()
