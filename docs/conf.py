"""How the documentation site is built: ``make docs``."""

from __future__ import annotations

import sys
from importlib.metadata import version as installed
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # mathml.py

project = "Headway"
author = "The Headway authors"
copyright = "2026, The Headway authors. Apache-2.0"
release = version = installed("headway")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_gallery.gen_gallery", "mathml"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
exclude_patterns = ["_build", "examples"]
html_theme = "furo"
html_title = "Headway"
html_show_sphinx = False
html_copy_source = False
html_show_search_summary = False  # it would be fetched, which a browser refuses to a file on disk

myst_enable_extensions = ["colon_fence", "dollarmath"]
html_math_renderer = "mathml"
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # signatures in the text are long enough
autodoc_preserve_defaults = True

sphinx_gallery_conf = {
    "examples_dirs": "examples",
    "gallery_dirs": "gallery",
    "filename_pattern": r"/plot_",
    "download_all_examples": False,
    "remove_config_comments": True,
    "show_memory": False,
    "show_signature": False,
    "abort_on_example_error": True,
    "plot_gallery": "True",
    "within_subsection_order": "FileNameSortKey",
    "reset_modules": ("matplotlib",),
}
suppress_warnings = ["config.cache"]  # the gallery's settings cannot be stored, which changes nothing
