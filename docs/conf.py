"""The documentation site, which `make docs` builds from the pages of the repository; `site_pages.py` makes the rest."""

import sys
from pathlib import Path

from lockstep.version import __version__

sys.path.insert(0, str(Path(__file__).parent))

project = "Lockstep"
version = release = __version__
html_title = f"Lockstep {__version__}"
html_theme = "furo"
html_additional_pages = {"index": "redirect.html"}
templates_path = ["."]
html_sidebars = {
    "**": [
        *("sidebar/brand.html", "sidebar/search.html", "versions.html", "sidebar/scroll-start.html"),
        *("sidebar/navigation.html", "sidebar/scroll-end.html", "sidebar/variant-selector.html"),
    ]
}
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode", "site_pages"]

root_doc = "docs/index"  # sources are where they are in the repository, so that their links hold on a code host too
include_patterns = ["*.md", "benchmarks/README.md", "data/*/SOURCE.md", "docs/**.md"]
exclude_patterns = [".*", "build", "runs", "lockstep", "tests"]

nitpicky = True
nitpick_ignore_regex = [("py:.*", ".*")]  # types of other libraries, whose sites are not asked, and of inner modules
myst_heading_anchors = 4
highlight_language = "none"
html_copy_source = False
html_favicon = "images/favicon.svg"
smartquotes = False  # a word in quotes is one to be typed

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_class_signature = "mixed"
python_maximum_signature_line_length = 100
toc_object_entries_show_parents = "hide"
suppress_warnings = ["ref.python"]  # words of a choice, such as "hue", that are also names of fields
