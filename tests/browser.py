"""Drives headless Chromium by the WebDriver protocol over plain HTTP: Debian's packages chromium
and chromium-driver, and no library."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
DRIVER = shutil.which("chromedriver")


class Browser:
    """One window without a network; `close` ends it and its driver."""

    def __init__(self, folder: Path, width: int = 1200, height: int = 1000) -> None:
        assert CHROMIUM is not None
        assert DRIVER is not None
        log = folder / "driver.log"
        with log.open("w") as out:
            self._process = subprocess.Popen([DRIVER, "--port=0"], stdout=out, stderr=out)
        deadline = time.monotonic() + 120
        while not (found := re.search(r"on port (\d+)\.", log.read_text())):
            assert self._process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, "the driver does not start"
            time.sleep(0.05)
        self._root = f"http://127.0.0.1:{found[1]}/session"
        arguments = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        arguments += ["--disable-dev-shm-usage", f"--user-data-dir={folder}/profile"]
        arguments += ["--host-resolver-rules=MAP * ~NOTFOUND", "--force-color-profile=srgb"]
        options = {
            "goog:chromeOptions": {"binary": CHROMIUM, "args": arguments},
            "goog:loggingPrefs": {"performance": "ALL", "browser": "ALL"},
        }
        try:
            answer = self._ask("POST", "", {"capabilities": {"alwaysMatch": options}})
            self._root += f"/{answer['sessionId']}"
            self.command("Network.enable")
            offline = {"offline": True, "latency": 0, "downloadThroughput": 0}
            self.command("Network.emulateNetworkConditions", **offline, uploadThroughput=0)
            self.resize(width, height)
        except BaseException:
            self.close()
            raise

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = Request(self._root + path, data, {"Content-Type": "application/json"})
        request.method = method
        with urlopen(request, timeout=120) as response:
            return json.load(response)["value"]

    def command(self, name: str, **parameters: Any) -> Any:
        """A command of the DevTools protocol."""
        body = {"cmd": name, "params": parameters}
        return self._ask("POST", "/goog/cdp/execute", body)

    def resize(self, width: int, height: int = 1000) -> None:
        """Gives the page this many CSS pixels; a window could not be so narrow."""
        self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def open(self, page: Path) -> None:
        """Loads a file."""
        self._ask("POST", "/url", {"url": page.resolve().as_uri()})

    def run(self, script: str) -> Any:
        """What a script returns that runs beside the page, whatever the page's policy forbids."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": []})

    def print_media(self) -> None:
        """Lays the page out as for paper."""
        self.command("Emulation.setEmulatedMedia", media="print")

    def screenshot(self, path: Path) -> None:
        """The whole page, however long."""
        height = self.run("return document.documentElement.scrollHeight")
        clip = {"x": 0, "y": 0, "width": self.run("return innerWidth"), "height": height}
        shot = self.command(
            "Page.captureScreenshot", captureBeyondViewport=True, clip={**clip, "scale": 1}
        )
        path.write_bytes(base64.b64decode(shot["data"]))

    def pdf(self) -> bytes:
        """The page as it is printed on A4."""
        found = self.command("Page.printToPDF", paperWidth=8.27, paperHeight=11.69)
        return base64.b64decode(found["data"])

    def requests(self) -> list[str]:
        """Every address that the page asked for since the last call, itself among them."""
        entries = self._ask("POST", "/se/log", {"type": "performance"})
        messages = [json.loads(entry["message"])["message"] for entry in entries]
        return [
            one["params"]["request"]["url"]
            for one in messages
            if one["method"] == "Network.requestWillBeSent"
        ]

    def complaints(self) -> list[str]:
        """What the browser wrote to its console since the last call."""
        return [entry["message"] for entry in self._ask("POST", "/se/log", {"type": "browser"})]

    def close(self) -> None:
        """Ends the browser and its driver."""
        try:
            if not self._root.endswith("/session"):
                self._ask("DELETE", "")
        finally:
            self._process.terminate()
            self._process.wait()
