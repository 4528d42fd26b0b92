"""A headless browser, where one is installed: what a page says on its console and asks for."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import socket
import subprocess
import threading
from typing import NamedTuple

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


class Seen(NamedTuple):
    """The document as scripts left it, messages on the console, what it asked the network for."""

    document: str
    console: list[str]
    requests: set[str]


def look_at(page: pathlib.Path, folder: pathlib.Path) -> Seen:
    """Open a file in a browser; skips the test where there is none (`MBX_BROWSER`: its path).

    What the browser asks for by itself, with an empty page, is no request of the page.
    """
    (empty := folder / "empty.html").write_text("<title>nothing</title>")
    by_itself = _open(empty, folder).requests
    seen = _open(page, folder)
    return seen._replace(requests=seen.requests - by_itself)


def _open(page: pathlib.Path, folder: pathlib.Path) -> Seen:
    program = os.environ.get("MBX_BROWSER") or next(filter(None, map(shutil.which, _NAMES)), None)
    if not program:
        pytest.skip("no browser: install chromium, or give MBX_BROWSER its path")
    asked = set()
    with socket.create_server(("127.0.0.1", 0)) as server:
        # All that a page asks for would go through here.
        def listen() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.settimeout(5)
                    asked.add(
                        " ".join(connection.recv(4096).decode("latin1").split()[:2]).split("?")[0]
                    )

        thread = threading.Thread(target=listen, daemon=True)
        thread.start()
        done = subprocess.run(
            [
                program,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-background-networking",
                "--disable-component-update",
                "--disable-sync",
                "--no-first-run",
                f"--user-data-dir={folder / 'profile'}",
                f"--proxy-server=127.0.0.1:{server.getsockname()[1]}",
                "--proxy-bypass-list=<-loopback>",
                "--enable-logging=stderr",
                "--virtual-time-budget=2000",
                "--dump-dom",
                page.resolve().as_uri(),
            ],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        server.shutdown(socket.SHUT_RDWR)
        thread.join(10)
    console = re.findall(r":CONSOLE[^\]]*\] (.*)", done.stderr)
    return Seen(done.stdout, console, asked)
