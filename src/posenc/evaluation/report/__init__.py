"""Report of a study: page, charts and tables."""
