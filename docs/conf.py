"""How Sphinx builds these pages: `make docs`. A link that leads nowhere is an error."""

from __future__ import annotations

import workbench.spec.run  # a page that cannot import what it describes should not be built

assert workbench.spec.run
project = "workbench"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["notebook.py"]
html_theme = "alabaster"
html_theme_options = {"description": "Knows when two runs may be compared", "page_width": "1100px"}
html_sidebars = {"**": ["about.html", "navigation.html", "searchbox.html"]}
html_show_copyright = False
myst_heading_anchors = 3
toc_object_entries = False
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_default_options = {"members": True, "undoc-members": False}
napoleon_google_docstring = True
napoleon_use_ivar = True
default_role = "code"
# The word after ``` of the tutorial's blocks is bash's, or nothing's.
highlight_language = "none"
