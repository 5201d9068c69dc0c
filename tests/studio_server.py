"""The studio in this process, and a browser beside it."""

from __future__ import annotations

import io
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
)  # fmt: skip
SCREENSHOTS = os.environ.get("SHORTRUN_SCREENSHOTS")
"""Folder that the browser tests write pictures of the page to."""


@contextmanager
def served(models: list[str], runs: Path) -> Iterator[str]:
    """The address of a page on loopback, served by the command in a process of its own, beside the runs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["studio", *models, "--no-browser", "--port", str(port), "--runs", runs.name]
    server = subprocess.Popen(
        [sys.executable, "-m", "shortrun", *words], stdout=subprocess.PIPE, text=True, cwd=runs.parent
    )
    try:
        assert server.stdout is not None
        line = server.stdout.readline()  # what it says when it is ready
        assert f"http://127.0.0.1:{port}" in line
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.communicate(timeout=30)


@contextmanager
def browser() -> Iterator[Any]:
    """Headless Chromium, or a skip that says why."""
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed: the page was not tested in a browser")
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: no test in a browser")
    with api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        try:
            yield running
        finally:
            running.close()


def shoot(page: Any, name: str) -> None:
    """A small picture of the page, if pictures are wanted."""
    if SCREENSHOTS:
        Path(SCREENSHOTS).mkdir(parents=True, exist_ok=True)
        picture = Image.open(io.BytesIO(page.locator(".gradio-container").screenshot())).convert("RGB")
        picture.quantize(96).save(Path(SCREENSHOTS) / f"studio-{name}.png", optimize=True)
