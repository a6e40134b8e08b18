"""Debian's Chromium, driven by playwright, for pages that must work as a person sees them.

As a script it gets the browser where that can be done without asking, and says what to run elsewhere.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
# libatomic1 is for playwright's driver, which comes without it.
INSTALL = "apt-get update && apt-get install -y --no-install-recommends chromium fonts-dejavu-core libatomic1"
# No sandbox, because containers run as root; nothing in the background, because a page must not need a network.
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]


def found():
    """The path of a Chromium, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def missing():
    """What keeps the pages from being tested here, with what to run; an empty string if nothing does."""
    lacks = []
    if found() is None:
        lacks.append("there is no Chromium")
    driver = subprocess.run([sys.executable, "-m", "playwright", "--version"], capture_output=True, text=True,
                            check=False)
    if driver.returncode != 0:
        lacks.append(f"playwright's driver does not start ({driver.stderr.strip().splitlines()[-1]})")
    return f"the report page is tested in a browser, and {' and '.join(lacks)}. Run: sudo sh -c '{INSTALL}'" if (
        lacks) else ""


def chromium():
    """The path of a Chromium; where none can be had the test is skipped, and says what to run."""
    lacking = missing()
    if lacking:
        pytest.skip(lacking)
    return found()


def install():
    """Get what is missing as root on Debian; elsewhere say what to run, and let the other tests go on."""
    if not missing():
        return
    if os.getuid() == 0 and shutil.which("apt-get"):
        subprocess.run(["sh", "-c", INSTALL], stdout=subprocess.DEVNULL, check=True,
                       env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"})
    lacking = missing()
    if lacking:
        sys.stderr.write(f"Tests of the page will be skipped: {lacking}\n")


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


if __name__ == "__main__":
    install()
