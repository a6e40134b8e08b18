"""One page that explains a run: self-contained HTML that opens without a network."""

from headway.report.page import write_report

__all__ = ["write_report"]
