"""Headless Chromium, driven by WebDriver, and a record of all that it asks other machines for."""

import shutil
import subprocess
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from io import BytesIO
from pathlib import Path
from threading import Thread
from typing import Any

import requests
from PIL import Image

from tests.helpers.servers.servers import free_port, wait_until_answering

CHROMIUM, CHROMEDRIVER = shutil.which("chromium"), shutil.which("chromedriver")

AXE = files("axe_core_python") / "axe.min.js"

SWITCHES = (
    "headless no-sandbox disable-gpu disable-dev-shm-usage disable-quic no-first-run disable-sync "
    # All rows of a table are drawn, and all columns.
    "disable-background-networking disable-component-update window-size=2400,4000"
).split()


@dataclass(frozen=True)
class Browser:
    """A running browser."""

    session: str
    """Address of the session at the driver."""

    asked: list[str]
    """Addresses on other machines that it asked for; none of them answered."""

    downloads: Path

    def open(self, url: str) -> None:
        self._post("url", url=url)

    def run(self, script: str, *arguments: Any) -> Any:
        """What a script returns in the frame that is chosen."""
        return self._post("execute/sync", script=script, args=list(arguments))

    def look_as(self, width: int, *, dark: bool) -> None:
        """Give the next pages a width in pixels, and a light or a dark scheme of colors."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        sizes = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
        for command, params in {
            "Emulation.setDeviceMetricsOverride": sizes,
            "Emulation.setEmulatedMedia": {"features": [scheme]},
        }.items():
            self._post("goog/cdp/execute", cmd=command, params=params)

    def take_picture(self, path: Path, *, top: int, height: int, width: int) -> None:
        """Write a part of the page, in pixels, as a PNG of at most 64 colors, which is small."""
        clip = {"x": 0, "y": top, "width": width, "height": height, "scale": 1}
        params = {"clip": clip, "captureBeyondViewport": True}
        shown = self._post("goog/cdp/execute", cmd="Page.captureScreenshot", params=params)
        image = Image.open(BytesIO(b64decode(shown["data"]))).convert("RGB")
        image.quantize(64, dither=Image.Dither.NONE).save(path, optimize=True)

    def complaints(self) -> list[str]:
        """What pages have written to the console since the last call, refused requests too."""
        return [entry["message"] for entry in self._post("se/log", type="browser")]

    def accessibility_violations(self, part: str = "html") -> list[str]:
        """What axe-core finds wrong in a part of the page, as rule, impact and first element."""
        self.run(AXE.read_text(encoding="utf-8"))
        found = self.run("return axe.run(arguments[0], {resultTypes: ['violations']})", part)
        return [
            f"{one['id']} ({one['impact']}): {one['nodes'][0]['html']}"
            for one in found["violations"]
        ]

    def choose_frame(self, number: int | None) -> None:
        """Choose the page itself, or one of its frames."""
        self._post("frame", id=None)
        if number is not None:
            self._post("frame", id=number)

    def _post(self, command: str, **body: Any) -> Any:
        reply = requests.post(f"{self.session}/{command}", json=body, timeout=120)
        assert reply.ok, reply.text
        return reply.json()["value"]


@contextmanager
def chromium(folder: Path) -> Iterator[Browser]:
    """Run a browser while the context lasts, with its profile and its downloads in `folder`."""
    with _driver(folder) as driver, _record() as (proxy, asked):
        options = {
            "binary": CHROMIUM,
            "args": [
                *(f"--{switch}" for switch in SWITCHES),
                f"--user-data-dir={folder / 'profile'}",
                # Addresses of this machine are not asked of a proxy.
                f"--proxy-server={proxy}",
            ],
            "prefs": {"download.default_directory": str(folder)},
        }
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        reply = requests.post(
            f"{driver}/session", json={"capabilities": {"alwaysMatch": wanted}}, timeout=120
        )
        assert reply.ok, reply.text
        session = f"{driver}/session/{reply.json()['value']['sessionId']}"
        try:
            yield Browser(session, asked, folder)
        finally:
            requests.delete(session, timeout=60)


@contextmanager
def _driver(folder: Path) -> Iterator[str]:
    port, log = free_port(), folder / "driver.log"
    with log.open("wb") as output:
        process = subprocess.Popen([str(CHROMEDRIVER), f"--port={port}"], stdout=output)
        try:
            wait_until_answering(f"http://127.0.0.1:{port}/status", process, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait()


@contextmanager
def _record() -> Iterator[tuple[str, list[str]]]:
    """A proxy that finds nothing, and the addresses that it was asked for."""
    asked: list[str] = []

    class Proxy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        def do_POST(self) -> None:
            self.do_GET()

        def do_CONNECT(self) -> None:
            self.do_GET()

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    thread = Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
