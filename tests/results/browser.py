"""A headless Chromium over its DevTools protocol: what a page logs, asks for and looks like."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp


def chromium() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


@dataclass
class Page:
    """One tab. `problems` are console errors and warnings; `requests` all addresses asked for."""

    socket: aiohttp.ClientWebSocketResponse
    problems: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    _loaded: asyncio.Event = field(default_factory=asyncio.Event)
    _waiting: dict[int, asyncio.Future[dict[str, Any]]] = field(default_factory=dict)
    _next: int = 0

    async def listen(self) -> None:
        async for message in self.socket:
            data = json.loads(message.data)
            if "id" in data:
                future = self._waiting.pop(data["id"], None)
                if future is not None and not future.done():
                    future.set_result(data)
                continue
            method, params = data["method"], data["params"]
            if method == "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                self.problems.append(params["entry"]["text"])
            elif method == "Runtime.exceptionThrown":
                self.problems.append(str(params["exceptionDetails"]["text"]))
            elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
                self.problems.append(str(params["args"]))
            elif method == "Page.loadEventFired":
                self._loaded.set()

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._next += 1
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[self._next] = future
        await self.socket.send_json({"id": self._next, "method": method, "params": params})
        data = await asyncio.wait_for(future, 30)
        assert "error" not in data, data
        result: dict[str, Any] = data["result"]
        return result

    async def open(self, address: str, width: int, dark: bool = False) -> None:
        for domain in ("Page", "Network", "Log", "Runtime"):
            await self.call(f"{domain}.enable")
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=900, deviceScaleFactor=1, mobile=width < 500,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        self._loaded.clear()
        await self.call("Page.navigate", url=address)
        await asyncio.wait_for(self._loaded.wait(), 30)

    async def value(self, script: str) -> Any:
        found = await self.call("Runtime.evaluate", expression=script, returnByValue=True)
        return found["result"].get("value")

    async def press_tab(self) -> None:
        for kind in ("keyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab",
                            windowsVirtualKeyCode=9)  # fmt: skip


@asynccontextmanager
async def browser_page(program: str) -> AsyncIterator[Page]:
    """A fresh browser with one tab; it is ended, and its profile removed, at the end."""
    profile = tempfile.mkdtemp(prefix="prfaas-browser-")
    process = await asyncio.create_subprocess_exec(
        program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--disable-background-networking", "--no-first-run", "--remote-debugging-port=0",
        f"--user-data-dir={profile}", "about:blank",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        port_file = Path(profile) / "DevToolsActivePort"
        for _ in range(300):
            if port_file.exists() and port_file.read_text().count("\n"):
                break
            await asyncio.sleep(0.1)
        port = port_file.read_text().splitlines()[0]
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                tabs = [tab for tab in await answer.json() if tab["type"] == "page"]
            async with session.ws_connect(
                tabs[0]["webSocketDebuggerUrl"], max_msg_size=64 << 20
            ) as socket:
                page = Page(socket)
                listener = asyncio.create_task(page.listen())
                try:
                    yield page
                finally:
                    listener.cancel()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        shutil.rmtree(profile, ignore_errors=True)
