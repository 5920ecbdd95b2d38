"""Headless Chromium through its DevTools protocol: pages, real key events, screenshots; no package needed."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import time
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --hide-scrollbars --disable-sync "
    "--disable-background-networking --disable-component-update --remote-debugging-pipe "
    "--force-device-scale-factor=1 --disable-smooth-scrolling"
)
_CODES = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32, "PageUp": 33, "PageDown": 34, "End": 35, "Home": 36}
_CODES |= {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
_TEXTS = {"Enter": "\r", "Tab": ""}
_PATIENCE = 45.0


class Stuck(AssertionError):
    """Chromium gives no reply."""


class Browser:
    """A Chromium process; a context manager that ends it."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None, "expected Chromium on the PATH"
        theirs_in, mine_out = os.pipe()
        mine_in, theirs_out = os.pipe()
        # Chromium reads commands from descriptor 3 and writes replies to 4; higher numbers cannot collide with them.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 64) for end in (theirs_in, theirs_out)]
        actions = [(os.POSIX_SPAWN_DUP2, ends[0], 3), (os.POSIX_SPAWN_DUP2, ends[1], 4)]
        actions += [(os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0)]  # type: ignore[list-item]
        words = [CHROMIUM, *_FLAGS.split(), f"--user-data-dir={profile}", "about:blank"]
        self._process = os.posix_spawn(CHROMIUM, words, os.environ, file_actions=actions, setpgroup=0)
        for end in (*ends, theirs_in, theirs_out):
            os.close(end)
        self._out, self._in = os.fdopen(mine_out, "wb", buffering=0), os.fdopen(mine_in, "rb", buffering=0)
        self._buffer, self._number, self._events = b"", 0, list[dict[str, Any]]()

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._out.close()
        self._in.close()
        os.killpg(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)

    def call(self, method: str, session: str = "", **params: Any) -> dict[str, Any]:
        """Send a command and return its result; events that arrive before it are kept."""
        self._number += 1
        command = {"id": self._number, "method": method, "params": params}
        self._out.write(json.dumps(command | ({"sessionId": session} if session else {})).encode() + b"\0")
        while (reply := self._read()).get("id") != self._number:
            self._events.append(reply)
        assert "error" not in reply, f"{method}: {reply['error']}"
        return dict(reply["result"])

    def wait_for(self, event: str, session: str) -> None:
        """Wait for an event of a page; forgets the ones before it."""
        while not any(e.get("method") == event and e.get("sessionId") == session for e in self._events):
            self._events.append(self._read())
        self._events.clear()

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._in], [], [], _PATIENCE)[0]:
                raise Stuck(f"Chromium gave no reply for {_PATIENCE:.0f} seconds")
            got = self._in.read(1 << 16)
            assert got, "Chromium has ended"
            self._buffer += got
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))

    def page(self, address: str, width: int = 1280, height: int = 800, scheme: str = "light") -> Page:
        """Open a page in a window of this size and color scheme, and wait until it has loaded."""
        # A separate context, so that data stored by one page does not reach the next.
        context = self.call("Target.createBrowserContext", disposeOnDetach=True)["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        page.call("Page.enable")
        page.call("Page.bringToFront")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        page.call("Emulation.setDeviceMetricsOverride", **size)
        page.call("Emulation.setFocusEmulationEnabled", enabled=True)
        page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        page.go(address)
        return page


class Page:
    """A tab of the browser."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command to this page."""
        return self._browser.call(method, self._session, **params)

    def go(self, address: str) -> None:
        """Load an address."""
        self.call("Page.navigate", url=address)
        self._browser.wait_for("Page.loadEventFired", self._session)

    def js(self, expression: str) -> Any:
        """Return the value of an expression; isolated from the page's content security policy."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, expression: str, seconds: float = 60.0) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + seconds
        while not self.js(f"!!({expression})"):
            assert time.monotonic() < end, f"still false: {expression}"
            time.sleep(0.02)

    def press(self, key: str, shift: bool = False) -> None:
        """Press and release a key, as a keyboard does."""
        text = _TEXTS.get(key, key if len(key) == 1 else "")
        event = {"key": key, "code": "Space" if key == " " else key, "modifiers": 8 if shift else 0}
        event["windowsVirtualKeyCode"] = _CODES.get(key) or ord(key.upper())
        self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **event)
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def press_and_load(self, key: str) -> None:
        """Press a key that leads to another page, and wait until that has loaded."""
        self.press(key)
        self._browser.wait_for("Page.loadEventFired", self._session)

    def close(self) -> None:
        """Close the tab."""
        self.call("Page.close")

    def write(self, text: str) -> None:
        """Type a text."""
        for letter in text:
            self.press(letter)

    def shot(self, path: Path) -> None:
        """Photograph the window."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
