import os
import time
from contextlib import contextmanager

import pytest
import torch
from hypothesis import settings

from headway.core.checks import InputError

torch.set_num_threads(1)

# Properties are checked on the same examples every time, so that a run says something about the change; make fuzz
# draws new ones, up to a number of examples and a time.
FUZZ = int(os.environ.get("FUZZ_EXAMPLES", "0"))
settings.register_profile("test", deadline=None, derandomize=True, max_examples=25)
settings.register_profile("fuzz", deadline=None, print_blob=True, max_examples=max(FUZZ, 1))
settings.load_profile("fuzz" if FUZZ else "test")
END = time.monotonic() + float(os.environ.get("FUZZ_SECONDS", "inf"))


def pytest_runtest_setup(item):
    """In make fuzz no property is begun once the time is up."""
    if time.monotonic() > END:
        pytest.skip("the time of make fuzz is up")


@pytest.fixture(scope="session")
def refused():
    """``with refused(name, *words)``: an InputError that names the argument, expected, got and to try."""

    @contextmanager
    def expect(name, *words):
        with pytest.raises(InputError) as caught:
            yield
        message = str(caught.value)
        assert message.startswith(f"{name}: expected "), message
        for word in ("; got ", "Try: ", *words):
            assert word in message, f"{word!r} is not in: {message}"

    return expect


@pytest.fixture(scope="session")
def browser():
    """One Chromium for all pages of a test process."""
    from playwright.sync_api import sync_playwright
    from tests.browser import QUIET, chromium

    with sync_playwright() as play:
        opened = play.chromium.launch(executable_path=chromium(), args=QUIET)
        yield opened
        opened.close()
