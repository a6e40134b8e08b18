"""The command line: reads arguments, calls the library, shows results. No mathematics."""

from headway.cli.main import main

__all__ = ["main"]
