"""The site: its sources, the built pages, and pages in a browser."""
