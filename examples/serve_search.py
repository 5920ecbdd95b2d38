"""Serve search as an OpenAI-compatible endpoint, and send a request from a plain HTTP client.

Run ``python examples/serve_search.py``. It does what ``mas-gym serve --planner sc:5 --port 8080`` does, asks one
question and stops.
"""

import json
import re
import signal
import subprocess
import sys
from urllib.request import Request, urlopen

COMMAND = [sys.executable, "-m", "mas_gym.cli", "serve", "--planner", "sc:5", "--port"]
QUESTION = "Tom has 3 pens and buys 4. How many pens does he have?"


def main(port: int = 8080) -> None:
    """Start the server, send a question, print the answer and its cost, and stop the server."""
    server = subprocess.Popen([*COMMAND, str(port)], stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        # The server prints its address just before it starts listening.
        while not re.search("Serving|Uvicorn running", line := server.stderr.readline()):
            assert line, "the server ended before it was ready"
        print(ask(f"http://127.0.0.1:{port}/v1/chat/completions"))
    finally:
        server.send_signal(signal.SIGINT)
        server.communicate(timeout=30)


def ask(url: str, attempts: int = 100) -> str:
    """Return the server's answer to the question, in any OpenAI client's format."""
    body = {"model": "mas-gym", "messages": [{"role": "user", "content": QUESTION}]}
    request = Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    for _ in range(attempts):
        try:
            with urlopen(request, timeout=60) as reply:
                answer = json.load(reply)
            return f"{answer['choices'][0]['message']['content']} ({answer['usage']['completion_tokens']} tokens)"
        except OSError:
            signal.sigtimedwait([], 0.1)
    raise SystemExit("the server did not answer")


if __name__ == "__main__":
    main()
