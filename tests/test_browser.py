"""A machine without a browser: it is installed where that may be done, else a sentence says what to run."""

from __future__ import annotations

import subprocess

import pytest
from tests import browser


@pytest.fixture
def bare(monkeypatch):
    """A machine on which no program but apt-get is found; what was run on it."""
    ran = []

    def run(words, **_):
        ran.append(words)
        return subprocess.CompletedProcess(words, 0, "", "")

    monkeypatch.setattr(browser.shutil, "which", lambda name: "/usr/bin/apt-get" if name == "apt-get" else None)
    monkeypatch.setattr(browser.subprocess, "run", run)
    return ran


def test_pages_are_skipped_with_what_to_run(bare):
    with pytest.raises(pytest.skip.Exception, match=r"there is no Chromium\. Run: sudo sh -c 'apt-get update"):
        browser.chromium()


def test_a_driver_that_does_not_start_is_told_with_its_own_words(bare, monkeypatch):
    words = "Traceback\nlibatomic.so.1: cannot open shared object file\n"
    monkeypatch.setattr(browser.shutil, "which", lambda name: f"/usr/bin/{name}")
    failed = subprocess.CompletedProcess(["playwright"], 127, "", words)
    monkeypatch.setattr(browser.subprocess, "run", lambda *_, **__: failed)
    said = browser.missing()
    assert "driver does not start (libatomic.so.1: cannot open" in said
    assert "libatomic1" in said.split("Run: ")[1]
    assert "no Chromium" not in said


@pytest.mark.parametrize(("user", "installs"), [(0, True), (1000, False)])
def test_root_gets_the_browser_and_others_a_sentence(bare, monkeypatch, capsys, user, installs):
    monkeypatch.setattr(browser.os, "getuid", lambda: user)
    browser.install()
    assert (["sh", "-c", browser.INSTALL] in bare) == installs
    assert "Tests of the page will be skipped: " in capsys.readouterr().err, "it is still not there"


def test_nothing_is_installed_where_nothing_is_missing(bare, monkeypatch, capsys):
    monkeypatch.setattr(browser.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(browser.os, "getuid", lambda: 0)
    browser.install()
    assert browser.chromium() == "/usr/bin/chromium"
    assert not any("apt-get" in " ".join(words) for words in bare)
    assert capsys.readouterr().err == ""
