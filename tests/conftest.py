from contextlib import contextmanager

import pytest
import torch
from hypothesis import settings

from headway.core.checks import InputError

torch.set_num_threads(1)

settings.register_profile("ci", deadline=None, print_blob=True, derandomize=False, max_examples=25)
settings.load_profile("ci")


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
