"""Debian's Chromium, driven by playwright, for pages that must work as a person sees them."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

INSTALL = "apt-get update && apt-get install -y --no-install-recommends chromium fonts-dejavu-core"
# No sandbox, because containers run as root; nothing in the background, because a page must not need a network.
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]


def chromium():
    """The path of a Chromium; it is installed where that can be done without asking, and demanded elsewhere."""
    names = ("chromium", "chromium-browser", "google-chrome")
    lock = Path(tempfile.gettempdir()) / f"headway-browser-{os.getuid()}.lock"
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # several test processes may arrive here at once
        found = next((path for name in names if (path := shutil.which(name))), None)
        if found is None and os.getuid() == 0 and shutil.which("apt-get"):
            subprocess.run(["sh", "-c", INSTALL], capture_output=True, check=False)
            found = shutil.which("chromium")
    if found is None:
        pytest.fail(f"the pages are tested in a real browser, and there is none. Run: sudo sh -c '{INSTALL}'")
    return found


class Visit:
    """A page opened from a file, with what it complained of and asked for."""

    def __init__(self, browser, path, width=1000, scheme="light"):
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.complaints, self.requests = [], []
        self.page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.address = Path(path).resolve().as_uri()

    def __enter__(self):
        self.page.goto(self.address)
        return self

    def __exit__(self, *_):
        self.context.close()
