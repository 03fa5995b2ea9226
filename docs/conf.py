"""Settings of Sphinx for these pages: `sphinx-build -W -b html docs docs/_build`."""

import json
from importlib.metadata import version as version_of
from pathlib import Path

project = "axonmpi"
release = version_of("axonmpi")
copyright = "the axonmpi authors"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
default_role = "py:obj"  # `World.new_group` in a docstring becomes a link where there is such a name

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

autodoc_mock_imports = ["lightning"]  # of an extra
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # attributes listed in a docstring and documented properties do not clash

html_theme = "furo"
html_title = "axonmpi"
html_show_copyright = False
html_show_sphinx = False
html_static_path = ["_static"]
html_css_files = ["code.css"]

SINCE = {
    name: version
    for version, names in json.loads(Path(__file__).with_name("since.json").read_text(encoding="utf-8")).items()
    for name in names
}
"""The version since which each entry of api.md is there."""


def add_version(app, what, name, obj, options, lines):
    """Add the version to an entry's docstring."""
    if name in SINCE:
        lines += ["", f".. versionadded:: {SINCE[name]}"]


def setup(app):
    """Connect the function above to Sphinx."""
    app.connect("autodoc-process-docstring", add_version)
