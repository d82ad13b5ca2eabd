"""The report of a comparison: a page, pictures and tables."""

from posenc.experiments.report.files import LiveReport, ReportFiles, write_report

__all__ = ["LiveReport", "ReportFiles", "write_report"]
