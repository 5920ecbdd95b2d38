"""The kinds of programs (a function, a command, an HTTP service), and how each kind is started and stopped."""

from __future__ import annotations

import asyncio
import http.client
import inspect
import json
import os
import shlex
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from time import sleep
from typing import Any, Protocol
from urllib.parse import urlsplit

from mas_gym.errors import ConfigError, DataNotFoundError, IdentityError
from mas_gym.internal.identity import identity_of
from mas_gym.internal.process_groups import guard, kill
from mas_gym.internal.text import name_of
from mas_gym.plugins import Registry
from mas_gym.programs.background import CURRENT, ProgramThread
from mas_gym.programs.dialects import PROVIDERS
from mas_gym.programs.execution import Ended, Execution, Failed
from mas_gym.programs.worlds import WORLD_VARIABLE

PROGRAMS = Registry("program", "mas_gym.programs", {})
"""Programs of packages by name, each a function or a `mas_gym.programs.Program`."""

_PAUSES = (0.05, 0.2, 0.4)
"""Seconds between attempts to reach a service."""

MAX_ANSWER = 2**20
"""Longest answer, in characters of a function's text and bytes of a command's output."""

MAX_ERROR = 2000
"""Number of last bytes kept of a command's standard error."""


class Stage(Protocol):
    """The interface of a runner that a source uses."""

    def url(self, execution: Execution) -> str:
        """Return the base URL for an execution's calls, on a loopback port."""

    def client(self, execution: Execution, asynchronous: bool) -> object:
        """Return an OpenAI client that works without a socket."""

    def on_loop(self, execution: Execution, work: Callable[[], object]) -> Callable[[], None]:
        """Run, on the programs' loop, the coroutine that ``work`` returns; return a function that cancels it."""

    def on_side_loop(self, work: Callable[[], object]) -> Callable[[], None]:
        """Run, on the internal loop, which user code never blocks, the coroutine that ``work`` returns."""


class FunctionSource:
    """A Python function, called as ``solve(question, base_url=...)`` or ``solve(question, client=...)``.

    Asynchronous functions share one event loop; each execution of a synchronous function has a separate thread.

    Attributes:
        function: The function.
        name: Its name in reports.
        named: Which of the parameters ``client``, ``base_url``, ``api_key`` and ``world`` it has.
        asynchronous: Whether it is a coroutine function.
        async_client: Whether its client is an `openai.AsyncOpenAI`.
        parked: Maximum number of waiting executions to keep, to avoid replays.
        running: Maximum number of concurrent executions, not counting waiting ones.
        needs_key: Whether the program has a parameter for the key; even without a key, the base URL is unguessable.
    """

    parked, running = 256, 64

    def __init__(self, function: Callable[..., Any], name: str = "", *, world: bool) -> None:
        """Inspect the function's parameters. Raises `ConfigError`, also if it does not take, or needs, a world."""
        self.function, self.name = function, name or name_of(function).rpartition(".")[2]
        try:
            parameters = inspect.signature(function).parameters
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"program {self.name}: expected a function whose signature can be inspected ({error})"
            ) from error
        self.named = {name for name in ("client", "base_url", "api_key", "world") if name in parameters}
        rest = [p for name, p in parameters.items() if name not in self.named and p.default is inspect.Parameter.empty]
        rest = [p for p in rest if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        if len(rest) != 1 or not {"client", "base_url"} & self.named:
            raise ConfigError(
                f"program {self.name}: expected a function of (question, base_url) or (question, client), "
                f"got {inspect.signature(function)}"
            )
        self.asynchronous = inspect.iscoroutinefunction(function)
        hint = str(parameters["client"].annotation) if "client" in parameters else ""
        self.async_client = "Async" in hint or (self.asynchronous and "OpenAI" not in hint)
        self.needs_key = "api_key" in self.named or "client" in self.named
        if world and "world" not in self.named:
            raise ConfigError(f"program {self.name}: the function takes no world, but got one; add the parameter world")
        if not world and "world" in self.named and parameters["world"].default is inspect.Parameter.empty:
            raise ConfigError(
                f"program {self.name}: the function requires a world, but got none; create "
                'Program(..., world=Folder("repo"))'
            )

    def identity(self) -> object:
        """Return the function."""
        return {"code": self.function}

    def start(self, execution: Execution, stage: Stage) -> Callable[[], None]:
        """Run the function on the loop of programs or on a thread."""
        if self.asynchronous:
            return stage.on_loop(execution, lambda: self._awaited(execution, stage))
        threading.Thread(target=self._called, args=(execution, stage), name="mas-gym-program", daemon=True).start()
        return execution.interrupt.request

    def _arguments(self, execution: Execution, stage: Stage) -> dict[str, object]:
        given: dict[str, object] = {}
        if "base_url" in self.named:
            given["base_url"] = stage.url(execution)
        if "api_key" in self.named:
            given["api_key"] = execution.key
        if "client" in self.named:
            given["client"] = stage.client(execution, self.async_client)
        if "world" in self.named and execution.copy is not None:
            given["world"] = execution.copy
        return given

    async def _awaited(self, execution: Execution, stage: Stage) -> None:
        try:
            if not await entered(execution):
                return
            execution.observed = True
            given = self._arguments(execution, stage)
            CURRENT.set(execution)
            execution.finish(ended(await self.function(execution.question, **given)))
        except BaseException as error:
            # After a stop, the outcome is not used.
            execution.finish(failed(error))
        finally:
            left(execution)

    def _called(self, execution: Execution, stage: Stage) -> None:
        job = ProgramThread(execution, self.function)
        job.here()
        execution.activity.begin(job)
        execution.observed = True
        try:
            if not execution.enter():
                return
            given = self._arguments(execution, stage)
            CURRENT.set(execution)
            with execution.interrupt.allowed():
                answer = self.function(execution.question, **given)
            execution.finish(ended(answer))
        except BaseException as error:
            execution.finish(failed(error))
        finally:
            execution.leave()


async def entered(execution: Execution) -> bool:
    """Create the program's copy of its world without blocking the loop; see `Execution.enter`."""
    return not execution.has_world or await asyncio.to_thread(execution.enter)


def left(execution: Execution) -> None:
    """Remove the copy on a thread, because the loop must not wait for it and may be closing."""
    if execution.has_world:
        threading.Thread(target=execution.leave, name="mas-gym-world", daemon=True).start()


class CommandSource:
    """A command that reads the question from standard input, or as the argument ``{question}``, and prints the answer.

    Its environment has ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY``, the same for the other `PROVIDERS`, and
    ``PYTHONHASHSEED=0`` unless this is already set.
    """

    needs_key: bool = True
    parked, running = 16, 16

    def __init__(self, command: str | Sequence[str], files: Sequence[str | os.PathLike[str]] = ()) -> None:
        """Split the command like a shell. Raises `ConfigError`, `DataNotFoundError`."""
        try:
            self.words = shlex.split(command) if isinstance(command, str) else [str(word) for word in command]
        except ValueError as error:
            raise ConfigError(f"program {command!r}: {error}; quote it as in a shell") from error
        if not self.words:
            raise ConfigError("program: expected a command, got an empty string")
        self.name = next((Path(word).stem for word in self.words if word.endswith(".py")), Path(self.words[0]).name)
        self.files = stated_files(files)

    def identity(self) -> object:
        """Return the command and the contents of its files. Raises `IdentityError` without files."""
        return {"command": self.words, "files": contents(f"the command {shlex.join(self.words)!r}", self.files)}

    def start(self, execution: Execution, stage: Stage) -> Callable[[], None]:
        """Start a process in a new group; stopping kills the group."""
        return stage.on_side_loop(lambda: self._run(execution, stage))

    async def _run(self, execution: Execution, stage: Stage) -> None:
        try:
            if await entered(execution):
                await self._ran(execution, stage)
        finally:
            left(execution)

    async def _ran(self, execution: Execution, stage: Stage) -> None:
        words = [word.replace("{question}", execution.question) for word in self.words]
        given = {f"{provider}_BASE_URL": stage.url(execution) for provider in PROVIDERS}
        given |= {f"{provider}_API_KEY": execution.key for provider in PROVIDERS}
        if execution.copy is not None:
            given[WORLD_VARIABLE] = execution.copy
        # Otherwise the sets of a Python program have a different order in each replay.
        environment = {"PYTHONHASHSEED": "0"} | os.environ | self.environment() | given
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                *words, stdin=pipe, stdout=pipe, stderr=pipe, env=environment, start_new_session=True
            )
        except (OSError, ValueError) as error:
            execution.finish(Failed(f"the command {words[0]!r} cannot be started: {error}"))
            return
        guard(process.pid)
        try:
            outcome = await _talked(
                process, b"" if words != self.words else execution.question.encode("utf-8", "replace")
            )
        finally:
            await _killed(process)
        execution.finish(self.read(outcome))

    def environment(self) -> dict[str, str]:
        """Return additional environment variables for the command."""
        return {}

    def read(self, outcome: Ended | Failed) -> Ended | Failed:
        """Convert the output to an outcome."""
        return outcome


class IsolatedSource(CommandSource):
    """A Python function that runs in a new process each time, so that no state outlives an execution."""

    def __init__(self, inner: FunctionSource, spec: str | None = None) -> None:
        """Find the function's file. Raises `ConfigError`."""
        super().__init__([sys.executable, "-P", "-m", "mas_gym.programs.isolated", spec or _spec_of(inner.function)])
        self.function, self.name, self.needs_key = inner.function, inner.name, inner.needs_key

    def identity(self) -> object:
        """Return the identity of the function, which does not depend on earlier executions."""
        return {"function": identity_of(self.function), "isolate": True}

    def environment(self) -> dict[str, str]:
        """Return variables that make this process's modules importable in the new process."""
        return {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

    def read(self, outcome: Ended | Failed) -> Ended | Failed:
        """Return the function's answer or failure."""
        if isinstance(outcome, Failed):
            return outcome
        try:
            said = json.loads(outcome.answer)
        except ValueError:
            return Failed("its process ended without an answer")
        return Ended(said["answer"]) if "answer" in said else Failed(said["error"])


def _spec_of(function: Callable[..., object]) -> str:
    """Return ``FILE.py:NAME`` of a function. Raises `ConfigError`."""
    name, found = name_of(function), None
    with suppress(TypeError, OSError):
        found = inspect.getsourcefile(inspect.unwrap(function))
    if not found or not name.isidentifier():
        raise ConfigError(
            f"isolate: expected FILE.py:NAME or a function at the top level of a file, got {name or function!r}; other "
            "processes cannot import it"
        )
    return f"{Path(found).resolve()}:{name}"


async def _talked(process: asyncio.subprocess.Process, text: bytes) -> Ended | Failed:
    """Send a process its input, and return the outcome from its output and exit status."""
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    try:
        out, err, _ = await asyncio.gather(_read(process.stdout), _tail(process.stderr), _feed(process.stdin, text))
    except OverflowError:
        return Failed(f"the command printed more than {MAX_ANSWER:,} bytes")
    if code := await process.wait():
        return Failed(f"the command ended with status {code}: {err.decode('utf-8', 'replace').strip()}")
    return ended(out.decode("utf-8", "replace").strip())


async def _killed(process: asyncio.subprocess.Process) -> None:
    """Kill a process and its process group, and reap it even if the caller is cancelled meanwhile."""
    kill(process.pid)
    # wait() also waits for the ends of the pipes, and excess output in them is never read.
    process._transport.close()  # type: ignore[attr-defined]
    while process.returncode is None:
        with suppress(asyncio.CancelledError):
            await asyncio.shield(process.wait())


async def _feed(pipe: asyncio.StreamWriter, text: bytes) -> None:
    with suppress(ConnectionError, BrokenPipeError):
        pipe.write(text)
        await pipe.drain()
    pipe.close()


async def _read(pipe: asyncio.StreamReader) -> bytes:
    """Read to the end. Raises `OverflowError` for more than `MAX_ANSWER` bytes."""
    found = bytearray()
    while part := await pipe.read(2**16):
        found += part
        if len(found) > MAX_ANSWER:
            raise OverflowError
    return bytes(found)


async def _tail(pipe: asyncio.StreamReader) -> bytes:
    """Read to the end, and return the last `MAX_ERROR` bytes."""
    found = b""
    while part := await pipe.read(2**16):
        found = (found + part)[-MAX_ERROR:]
    return found


class ServiceSource:
    """An HTTP service: a POST sends ``question``, ``base_url`` and ``api_key``; the reply has ``answer``, or is text.

    With a world, the request also has ``world``: the name of a copy reserved for this request until the reply.
    """

    needs_key = True
    parked, running = 256, 64

    def __init__(self, url: str, files: Sequence[str | os.PathLike[str]] = ()) -> None:
        """Check the address. Raises `ConfigError`, `DataNotFoundError`."""
        parts = urlsplit(url)
        try:
            self._port = parts.port
        except ValueError:
            raise ConfigError(f"program {url!r}: expected a number as the port") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"program {url!r}: expected an address such as http://127.0.0.1:9000/solve")
        if parts.username is not None or parts.query:
            raise ConfigError(
                f"program at {parts.hostname}: expected an address without a user, a password and a query, which would "
                "not be sent; give them to the service in its own configuration"
            )
        self.url, self.name, self._parts = url, parts.hostname, parts
        self.files = stated_files(files)

    def identity(self) -> object:
        """Return the URL's path and the contents of the given files; the host is left out, so it may change.

        Raises `IdentityError` without files.
        """
        return {"service": self._parts.path, "files": contents(f"the service {self.url}", self.files)}

    def start(self, execution: Execution, stage: Stage) -> Callable[[], None]:
        """Send the request on a thread; stopping closes the connection."""
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._parts.hostname or "", self._port)
        url = stage.url(execution)
        threading.Thread(
            target=self._post, args=(connection, execution, url), name="mas-gym-program", daemon=True
        ).start()

        def stop() -> None:
            if connection.sock is not None:
                with suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)

        return stop

    def _post(self, connection: http.client.HTTPConnection, execution: Execution, url: str) -> None:
        if not execution.enter():
            return
        body = {"question": execution.question, "base_url": url, "api_key": execution.key}
        asked = json.dumps(body if execution.copy is None else body | {"world": execution.copy})
        pauses = iter(_PAUSES)
        outcome: Ended | Failed | None = None
        while outcome is None:
            try:
                connection.connect()
                if execution.over:
                    # Stopped before there was a connection to close.
                    raise ConnectionAbortedError
                outcome = self._reply(connection, asked)
            except ConnectionError as error:
                # A service that is full or restarting has not processed the request.
                pause = next(pauses, None)
                if pause is None or execution.asked or execution.over:
                    outcome = failed(error)
                else:
                    sleep(pause)
            except (OSError, http.client.HTTPException, ValueError) as error:
                outcome = failed(error)
            finally:
                connection.close()
        execution.finish(outcome)
        execution.leave()

    def _reply(self, connection: http.client.HTTPConnection, asked: str) -> Ended | Failed:
        connection.request("POST", self._parts.path or "/", asked, {"content-type": "application/json"})
        response = connection.getresponse()
        body = response.read(MAX_ANSWER + 1)
        if response.status != 200:
            text = body[:500].decode("utf-8", "replace")
            return Failed(f"the service replied with status {response.status}: {text}")
        if len(body) > MAX_ANSWER:
            return Failed(f"the service replied with more than {MAX_ANSWER:,} bytes")
        if "json" in response.headers.get("content-type", ""):
            reply = json.loads(body)
            return ended(reply.get("answer") if isinstance(reply, dict) else reply)
        return ended(body.decode("utf-8", "replace").strip())


Source = FunctionSource | CommandSource | ServiceSource
"""A kind of program: its name, identity, whether its calls need a key, and how to start and stop an execution."""


def contents(program: str, files: Sequence[Path]) -> dict[str, bytes]:
    """Return the files' contents by name; equal names are numbered, because folders are ignored."""
    if not files:
        raise IdentityError(
            f"{program} does not specify the files that determine its behavior: name them with Program(..., "
            "files=[...]) or --program-file, or run without a store"
        )
    found: dict[str, bytes] = {}
    for place, path in enumerate(files):
        alike = sum(other.name == path.name for other in files[:place])
        found[f"{path.name} {alike + 1}" if alike else path.name] = path.read_bytes()
    return found


def stated_files(files: Sequence[str | os.PathLike[str]]) -> tuple[Path, ...]:
    """Return the files as paths, in order. Raises `DataNotFoundError`."""
    paths = tuple(Path(file) for file in ([files] if isinstance(files, str | os.PathLike) else files))
    for path in paths:
        if not path.is_file():
            raise DataNotFoundError(f"program files: expected a file at {str(path)!r}, found none")
    return paths


def ended(answer: object) -> Ended | Failed:
    """Return the outcome of a program that returned."""
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        return Failed(f"the program returned {type(answer).__name__}, expected its answer as text or a number")
    text = str(answer)
    if len(text) > MAX_ANSWER:
        return Failed(f"the program returned {len(text):,} characters, expected at most {MAX_ANSWER:,}")
    return Ended(text)


def failed(error: BaseException) -> Failed:
    """Return the outcome of a program that raised an exception."""
    text = str(error)
    return Failed(f"{type(error).__name__}: {text[:2000]}" if text else type(error).__name__)
