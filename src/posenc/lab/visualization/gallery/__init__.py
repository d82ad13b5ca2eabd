"""The gallery: every method on one page, with its formulas, pictures and claims."""

from posenc.lab.visualization.gallery.page import render_gallery, write_gallery

__all__ = ["render_gallery", "write_gallery"]
