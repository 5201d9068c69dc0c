"""Serve the page, on this machine alone unless told otherwise."""

from __future__ import annotations

import os
import tempfile
import threading
import weakref
from collections.abc import Sequence
from importlib.resources import files
from ipaddress import ip_address
from pathlib import Path
from typing import Any

WAITING = 40
"""Requests that wait for chains at most; more are told to come back."""
DEPENDENCY = "the studio needs gradio: pip install 'shortrun[studio]'"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def serve(
    models: Sequence[str],
    host: str = "127.0.0.1",
    port: int | None = None,
    browser: bool = True,
    runs: Path = Path("runs"),
    data_root: str | None = None,
    block: bool = True,
    warm: bool = True,
) -> Any:
    """Load the models once and serve the page; with ``block=False`` it returns the page, which has ``close()``."""
    # Gradio looks at these when it is imported: no words to its makers, and files in a folder that goes with us.
    folder = tempfile.TemporaryDirectory(prefix="shortrun-studio-")
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    os.environ["GRADIO_TEMP_DIR"] = folder.name
    try:
        import gradio as gr
    except ImportError:
        raise ValueError(DEPENDENCY) from None
    import torch

    from shortrun.studio.page import build
    from shortrun.studio.shared import Studio
    from shortrun.studio.sources import MOST_UPLOAD_BYTES, open_source

    # One thread for each request: on images as small as these two threads wait for each other more than they help.
    cores = os.cpu_count() or 1
    torch.set_num_threads(1)
    studio = Studio([open_source(name, data_root) for name in models], runs, any_folder=is_loopback(host))
    page = build(studio)
    page.queue(max_size=WAITING, default_concurrency_limit=cores)
    script, style = (files("shortrun.studio").joinpath(name).read_text() for name in ("studio.js", "studio.css"))
    if warm:
        threading.Thread(target=studio.warm_up, daemon=True).start()
    if not is_loopback(host):
        print(f"This page listens on {host}: everybody who reaches this machine can use it.")
    # System fonts: nothing is downloaded.
    theme = gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])
    page.launch(
        server_name=host, server_port=port, inbrowser=browser, share=False, quiet=True, prevent_thread_lock=True,
        max_file_size=MOST_UPLOAD_BYTES, footer_links=[], theme=theme, css=style,
        head=f"<script>{script}</script>", ssr_mode=False,
    )  # fmt: skip
    weakref.finalize(page, folder.cleanup)
    print(f"shortrun studio: {page.local_url} (Ctrl-C ends it)", flush=True)
    if block:
        page.block_thread()
    return page
