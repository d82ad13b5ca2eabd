"""Settings of the site: ``make docs`` builds it into build/docs."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE / "_ext")]

import torch  # noqa: E402
from scripts.docs.__main__ import write  # noqa: E402

import posenc  # noqa: E402  (after the path of the site's own extensions)

gc.disable()  # looking through pages, trees of many nodes, is a fifth of the time
torch.set_num_threads(1)  # tensors are small here, and threads cost more than they save
write()

project, author, language = "posenc", "The posenc authors", "en"
version = release = posenc.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
    "choices",
    "glossed",
    "languages",
    "line_ends",
    "mathml",
    "pictures",
    "type_hints",
]
exclude_patterns = [
    "_ext",
    "_extra",
    "_templates",
    "examples",
    "**.ipynb_checkpoints",
    "gallery/*.py",
    "gallery/*.ipynb",
]
templates_path = ["_templates"]
suppress_warnings = ["config.cache"]
nitpicky = False

myst_enable_extensions = [
    "attrs_block",
    "attrs_inline",
    "colon_fence",
    "deflist",
    "dollarmath",
]
myst_heading_anchors = 3
nb_execution_mode = "cache"
nb_execution_cache_path = str(HERE.parent / "build" / "notebooks")
nb_execution_raise_on_error = True
nb_execution_timeout = 120
nb_execution_show_tb = True

smartquotes_action = "qe"  # quotes and ellipses; two hyphens begin an option
autodoc_typehints = "description"
napoleon_use_ivar = True
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "undoc-members": False}

sphinx_gallery_conf = {
    "examples_dirs": "examples",
    "gallery_dirs": "gallery",
    "filename_pattern": r"\.py$",
    "image_scrapers": ("charts.scraper",),
    "reset_modules": (),
    "show_memory": False,
    "min_reported_time": 3600,
    "write_computation_times": False,
    "abort_on_example_error": True,
    "download_all_examples": False,
    "remove_config_comments": True,
    "show_signature": False,
}

html_theme = "pydata_sphinx_theme"
html_title = f"posenc {release}"
html_static_path = ["_static"]
html_extra_path = ["_extra"]  # the explorer's page, as it is
html_css_files = ["site.css"]
SCRIPTS = ("choices.js", "sidebar.js", "versions.js", "switcher.js")
html_js_files = [(name, {"defer": "defer"}) for name in SCRIPTS]
html_context = {"default_mode": "auto"}
html_math_renderer = "mathml"
html_show_sourcelink = False
html_copy_source = False
html_sidebars: dict[str, list[str]] = {
    page: []
    for page in (
        "index",
        "choose/index",
        "explorer/index",
        "zh/index",
        "zh/choose/index",
    )
}
html_theme_options = {
    "navbar_align": "left",
    "navbar_center": ["sections"],
    "header_links_before_dropdown": 8,
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
    "article_header_end": ["translation"],
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
}
copyright = "The posenc authors, Apache-2.0"  # noqa: A001  (Sphinx's name)
