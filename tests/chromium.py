"""A headless Chromium and what it finds wrong with pages, through its DevTools protocol.

Nothing but the ``chromium`` of a distribution and a web socket is needed: no driver, no download of a browser.
"""

from __future__ import annotations

import functools
import http.server
import json
import re
import shutil
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE_S

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
    *("--remote-debugging-port=0", "--remote-allow-origins=*"),
)


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a local server of the folder."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, name="site-server")
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@dataclass
class Browser:
    """One tab.

    Args:
        socket: the tab's web socket.
        faults: what went wrong since it was last emptied: errors on the console, exceptions, requests that failed or
            that left the local server.
    """

    socket: Any
    faults: list[str] = field(default_factory=list)
    _number: int = 0
    _loaded: bool = False

    def call(self, method: str, **parameters: Any) -> Any:
        """Call a method of the protocol, and return its result."""
        self._number += 1
        self.socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self.socket.recv())
            if message.get("id") == self._number:
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]
            self._hear(message.get("method", ""), message.get("params", {}))

    def _hear(self, event: str, what: dict[str, Any]) -> None:
        if event == "Page.loadEventFired":
            self._loaded = True
        elif event == "Runtime.exceptionThrown":
            self.faults.append(f"exception: {what['exceptionDetails']}")
        elif event == "Log.entryAdded" and what["entry"]["level"] == "error":
            self.faults.append(f"log: {what['entry']['text']} {what['entry'].get('url', '')}")
        elif event == "Runtime.consoleAPICalled" and what["type"] == "error":
            self.faults.append(f"console: {what['args']}")
        elif event == "Network.loadingFailed" and not what.get("canceled"):
            self.faults.append(f"loading failed: {what['errorText']}")
        elif event == "Network.responseReceived" and what["response"]["status"] >= 400:
            self.faults.append(f"{what['response']['status']}: {what['response']['url']}")
        elif event == "Network.requestWillBeSent" and not re.match(
            r"http://127\.0\.0\.1:|data:|blob:|about:", what["request"]["url"]
        ):
            self.faults.append(f"leaves the machine: {what['request']['url']}")

    def start(self) -> None:
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def screen(self, width: int, height: int, scheme: str) -> None:
        """The size of the screen, a phone's if it is narrow, and whether the user likes ``light`` or ``dark`` pages."""
        narrow = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=narrow)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def open(self, address: str) -> None:
        """Open a page, and wait until all of it is there."""
        self._loaded = False
        self.call("Page.navigate", url=address)
        self.wait_for("document.readyState == 'complete'", lambda: self._loaded)

    def evaluate(self, script: str) -> Any:
        """The value of an expression in the page; promises are awaited."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, f"{script}: {result['exceptionDetails']}"
        return result["result"].get("value")

    def wait_for(self, script: str, also: Any = lambda: True) -> None:
        """Wait until an expression in the page is true."""
        end = time.monotonic() + PATIENCE_S
        while not (self.evaluate(script) and also()):
            assert time.monotonic() < end, f"never true: {script}"
            time.sleep(0.05)


@contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """A fresh browser. Skips the test if there is none on this machine."""
    websocket = pytest.importorskip("websocket", reason="the package websocket-client is not installed")
    program = next((path for path in map(shutil.which, NAMES) if path), None)
    if program is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    process = subprocess.Popen(
        [program, *_FLAGS, f"--user-data-dir={profile}", "about:blank"], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    drain = threading.Thread(target=process.stderr.read, name="chromium-stderr")
    try:
        said = (re.search(r"DevTools listening on ws://127\.0\.0\.1:(\d+)/", line) for line in process.stderr)
        port = next(found[1] for found in said if found)
        drain.start()  # a full pipe would stop the browser
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json") as reply:
            [tab] = [tab for tab in json.load(reply) if tab["type"] == "page"]
        socket = websocket.create_connection(tab["webSocketDebuggerUrl"], timeout=PATIENCE_S)
        browser = Browser(socket)
        browser.start()
        yield browser
        socket.close()
    finally:
        process.terminate()
        process.wait()
        if drain.ident is not None:
            drain.join()
        process.stderr.close()
