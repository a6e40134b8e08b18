"""One page that explains a run, or two layers side by side: self-contained HTML that opens without a network."""

from headway.report.page import write_comparison, write_report

__all__ = ["write_comparison", "write_report"]
