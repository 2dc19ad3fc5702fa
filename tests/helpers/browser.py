"""Chromium without a window, driven through chromedriver's HTTP interface by the standard library alone."""

import base64
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
ABSENT = "" if CHROMIUM and DRIVER else "needs Debian's chromium and chromium-driver"
QUIET = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
]
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
KEYS = {"tab": "\ue004", "enter": "\ue007", "space": " ", "left": "\ue012", "right": "\ue014", "down": "\ue015"}


class Browser:
    """One window: open a file, run JavaScript, press keys, move the pointer, take a picture."""

    def __init__(self, base: str, session: str) -> None:
        self.base, self.session = base, session

    def open(self, page: Path) -> None:
        """Show a file, and forget what earlier pages logged."""
        self.logs("browser"), self.logs("performance")
        self._post("url", {"url": page.resolve().as_uri()})

    def visit(self, address: str) -> None:
        """Show a page of a server, and forget what earlier pages logged."""
        self.logs("browser"), self.logs("performance")
        self._post("url", {"url": address})

    def js(self, code: str, *arguments: Any) -> Any:
        """What a piece of JavaScript returns."""
        return self._post("execute/sync", {"script": code, "args": list(arguments)})

    def click(self, css: str) -> None:
        """Click the first element that matches, where a pointer would."""
        self._post(f"element/{self._find(css)}/click", {})

    def type(self, css: str, text: str) -> None:
        """Type into an element."""
        self._post(f"element/{self._find(css)}/value", {"text": text})

    def press(self, *names: str) -> None:
        """Press keys, one after the other, wherever the focus is."""
        keys = [{"type": kind, "value": KEYS[name]} for name in names for kind in ("keyDown", "keyUp")]
        self._post("actions", {"actions": [{"type": "key", "id": "keys", "actions": keys}]})

    def hover(self, css: str) -> None:
        """Move the pointer onto the middle of an element."""
        self.js("document.querySelector(arguments[0]).scrollIntoView({block: 'center'})", css)
        origin = {ELEMENT: self._find(css)}
        move = {"type": "pointerMove", "duration": 0, "x": 0, "y": 0, "origin": origin}
        self._post("actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": [move]}]})

    def leave(self) -> None:
        """Show nothing, and forget what the page before it asked for: a browser begins with one of its own."""
        self._post("url", {"url": "about:blank"})
        self.logs("performance")

    def cdp(self, command: str, **parameters: Any) -> Any:
        """A command of the DevTools protocol."""
        return self._post("goog/cdp/execute", {"cmd": command, "params": parameters})

    def size(self, width: int, height: int) -> None:
        """The size of the window's inside, as a phone or a screen has it."""
        shape = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.cdp("Emulation.setDeviceMetricsOverride", **shape)

    def colours(self, scheme: str) -> None:
        """What the system prefers: light or dark."""
        self.cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def picture(self, path: Path, whole: bool = False) -> None:
        """A PNG of what is seen, or of the whole page."""
        found = self.cdp("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))

    def logs(self, kind: str) -> list[dict[str, Any]]:
        """What was logged since it was asked last: the console (browser) or the network (performance)."""
        found: list[dict[str, Any]] = self._post("se/log", {"type": kind})
        return found

    def requested(self) -> list[str]:
        """The addresses that the page asked for since it was opened, itself included."""
        events = [json.loads(entry["message"])["message"] for entry in self.logs("performance")]
        return [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]

    def _find(self, css: str) -> str:
        return str(self._post("element", {"using": "css selector", "value": css})[ELEMENT])

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        return _call("POST", f"{self.base}/session/{self.session}/{path}", body)


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A fresh Chromium whose profile lies in a folder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    base = f"http://127.0.0.1:{port}"
    driver = subprocess.Popen([str(DRIVER), f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait(base)
        session = _call("POST", f"{base}/session", {"capabilities": {"alwaysMatch": _wishes(folder)}})["sessionId"]
        found = Browser(base, session)
        found.leave()
        yield found
        _call("DELETE", f"{base}/session/{session}", None)
    finally:
        driver.terminate()
        driver.wait(10)


def _wishes(folder: Path) -> dict[str, Any]:
    options = {"binary": CHROMIUM, "args": [*QUIET, f"--user-data-dir={folder / 'profile'}"]}
    return {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"}}


def _wait(base: str) -> None:
    for _ in range(200):
        try:
            if _call("GET", f"{base}/status", None)["ready"]:
                return
        except OSError:
            time.sleep(0.1)
    raise TimeoutError("chromedriver did not start")


def _call(method: str, url: str, body: dict[str, Any] | None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=60) as answer:
            return json.loads(answer.read())["value"]
    except urllib.error.HTTPError as error:
        with error:
            raise RuntimeError(error.read().decode()) from None
