"""The report of a comparison: a page, pictures and tables."""

from posenc.experiments.report.files import ReportFiles, write_report

__all__ = ["ReportFiles", "write_report"]
