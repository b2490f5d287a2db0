"""Opens a report page in headless Chromium and tells what it did; needs no package beside the browser.

The browser is driven over the DevTools protocol on a pair of pipes: JSON messages, each ended by a zero byte.
"""

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
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
)
READ_BY_BROWSER, WRITTEN_BY_BROWSER = 3, 4  # the descriptors of --remote-debugging-pipe
TIMEOUT_SECONDS = 60.0
CHARTS_DRAWN = "document.documentElement.dataset.drawn !== undefined"


def find_chromium() -> str | None:
    """The browser's path, or ``None`` where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Chromium:
    """One browser process, for a ``with`` block; ``profile`` is a new, empty folder."""

    def __init__(self, executable: str, profile: Path) -> None:
        commands, events = _high_pipe(), _high_pipe()
        quiet = _high(os.open(os.devnull, os.O_RDWR))
        actions = [(os.POSIX_SPAWN_DUP2, quiet, stream) for stream in (0, 1, 2)]
        actions += [
            (os.POSIX_SPAWN_DUP2, commands[0], READ_BY_BROWSER),
            (os.POSIX_SPAWN_DUP2, events[1], WRITTEN_BY_BROWSER),
        ]
        arguments = [executable, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self._process = os.posix_spawn(executable, arguments, os.environ, file_actions=actions, setpgroup=0)
        for descriptor in (quiet, commands[0], events[1]):
            os.close(descriptor)
        self._commands, self._events = commands[1], events[0]
        self._last_id, self._unread = 0, b""
        self._pages: dict[str, OpenedPage] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        os.killpg(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
        os.close(self._commands)
        os.close(self._events)

    def open(
        self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False, ready: str = CHARTS_DRAWN
    ) -> OpenedPage:
        """Load a file in a new tab of this size and wait until the JavaScript expression ``ready`` is true."""
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        page = self._pages[session] = OpenedPage(self, session)
        page.address = path.resolve().as_uri()
        for domain in ("Page", "Runtime", "Network", "Log"):
            page.call(f"{domain}.enable")
        page.call(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False},
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.call("Emulation.setEmulatedMedia", {"features": [scheme]})
        page.call("Page.navigate", {"url": page.address})
        page.wait_until(f"document.readyState === 'complete' && ({ready})")
        return page

    def call(self, method: str, parameters: dict[str, Any] | None = None, session: str | None = None) -> dict[str, Any]:
        """Send one command and return its result; events that arrive meanwhile are recorded with their page."""
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": parameters or {}}
        if session:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._commands, data) :]
        if method == "Page.handleJavaScriptDialog":
            return {}
        number = self._last_id
        while True:
            answer = self._next_message()
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            if page := self._pages.get(answer.get("sessionId", "")):
                page.record(answer.get("method", ""), answer.get("params", {}))

    def _next_message(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            if not select.select([self._events], [], [], TIMEOUT_SECONDS)[0]:
                raise TimeoutError(f"Chromium did not answer within {TIMEOUT_SECONDS:.0f} s")
            data = os.read(self._events, 1 << 16)
            if not data:
                raise RuntimeError("Chromium ended")
            self._unread += data
        message, _, self._unread = self._unread.partition(b"\0")
        return json.loads(message)


class OpenedPage:
    """A loaded page.

    ``console_errors`` holds the console's errors and warnings, uncaught exceptions, and refusals by the content
    security policy; ``requests`` every address that was asked for beside the page's own; ``dialogs`` each alert.
    """

    def __init__(self, browser: Chromium, session: str) -> None:
        self._browser, self._session = browser, session
        self.address = ""
        self.console_errors: list[str] = []
        self.requests: list[str] = []
        self.dialogs: list[str] = []

    @property
    def dom(self) -> str:
        """The document as HTML, after its scripts."""
        return self.evaluate("document.documentElement.outerHTML")

    @property
    def text(self) -> str:
        """The document's text, hidden parts included, scripts left out."""
        return self.evaluate(
            "(() => { const copy = document.body.cloneNode(true);"
            "for (const script of copy.querySelectorAll('script')) script.remove();"
            "return copy.textContent; })()"
        )

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", {"expression": expression, "returnByValue": True, "awaitPromise": True})
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait_until(self, expression: str) -> None:
        """Wait until a JavaScript expression is true."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not self.evaluate(expression):
            if time.monotonic() > deadline:
                raise TimeoutError(f"still not true: {expression}; the console says {self.console_errors}")
            time.sleep(0.05)

    def move_pointer(self, x: float, y: float) -> None:
        """Move the mouse pointer to this place of the window, in pixels."""
        self.call("Input.dispatchMouseEvent", {"type": "mouseMoved", "x": x, "y": y})

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """Save the whole page, or the window's part of it, as PNG."""
        answer = self.call("Page.captureScreenshot", {"format": "png", "captureBeyondViewport": whole})
        path.write_bytes(base64.b64decode(answer["data"]))

    def close(self) -> None:
        """Close the page's tab."""
        self.call("Page.close")

    def call(self, method: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
        """Send a DevTools command to this page."""
        return self._browser.call(method, parameters, self._session)

    def record(self, method: str, event: dict[str, Any]) -> None:
        """Note what an event of the browser says about this page."""
        if method == "Network.requestWillBeSent" and event["request"]["url"] != self.address:
            self.requests.append(event["request"]["url"])
        elif method == "Runtime.consoleAPICalled" and event["type"] in ("error", "warning", "assert"):
            self.console_errors.append(" ".join(str(part.get("value", part)) for part in event["args"]))
        elif method == "Runtime.exceptionThrown":
            self.console_errors.append(json.dumps(event["exceptionDetails"]))
        elif method == "Log.entryAdded" and event["entry"]["level"] in ("error", "warning"):
            self.console_errors.append(event["entry"]["text"])
        elif method == "Page.javascriptDialogOpening":
            self.dialogs.append(event["message"])
            self.call("Page.handleJavaScriptDialog", {"accept": True})


def _high_pipe() -> tuple[int, int]:
    """A pipe whose descriptors can't be taken for those that the browser is given."""
    reading, writing = os.pipe()
    return _high(reading), _high(writing)


def _high(descriptor: int) -> int:
    copy = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(descriptor)
    return copy
