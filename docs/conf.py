"""Settings of Sphinx for these pages: `sphinx-build -W -b html docs docs/_build`."""

from importlib.metadata import version as version_of

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
