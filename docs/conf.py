"""Sphinx: `make docs` builds these pages into build/docs."""

import re

import lltm_ext

project = "lltm_ext"
author = "the lltm_ext developers"
version = release = re.sub(r"\+.*", "", lltm_ext.__version__)

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["conf.py"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # their outputs are in them; tests/test_pages.py runs them
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings say what shapes and types are
add_module_names = False

html_theme = "pydata_sphinx_theme"
html_title = "lltm_ext"
html_show_sourcelink = False
html_static_path = ["static"]
html_css_files = ["site.css"]
html_sidebars = {"index": [], "sizes": []}  # the groups are in the header; a picture takes the width
html_theme_options = {
    "header_links_before_dropdown": 6,  # all of them: no "More"
    "navbar_align": "left",
    "show_nav_level": 2,
    "secondary_sidebar_items": {"**": ["page-toc"], "index": [], "sizes": []},
}
