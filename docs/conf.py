"""Configuration of the documentation: `sphinx-build -W docs docs/_build/html` builds it offline."""

import os
import sys
from pathlib import Path

import jaxlib

import jaxaudit

sys.path.insert(0, str(Path(__file__).parent / "_extensions"))

project = "jaxaudit"
author = "The jaxaudit developers"
copyright = author
version = release = jaxaudit.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "jaxaudit_reference",
]
exclude_patterns = ["_build", "_generated", "README.md"]
nitpicky = False
default_role = "code"  # what docstrings put between single backquotes

html_theme = "sphinx_book_theme"
html_title = "jaxaudit"
html_theme_options = {
    "show_toc_level": 2,
    "home_page_in_toc": False,
    "use_download_button": False,
    "navbar_persistent": [],
}
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["narrow.css"]

# Pages load nothing from outside: formulas are text, and figures are SVG files or inline.
mathjax_path = "none.js"  # required by Sphinx, and loaded only on pages with equations: there are none
nb_ipywidgets_js: dict[str, dict[str, str]] = {}
nb_mime_priority_overrides = [("html", "text/html", 0), ("html", "image/svg+xml", 1)]

myst_enable_extensions = ["colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 3

# Every code cell is executed in a temporary folder. Commands in cells find the `jaxaudit` of this environment.
nb_execution_mode = "cache"
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 120
nb_merge_streams = True
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # cells run small programs once, and so compile for most of the time
if jaxlib.__version__.startswith("0.10."):  # later versions refuse the option
    os.environ["XLA_FLAGS"] = "--xla_cpu_use_fusion_emitters=false"
os.environ["TQDM_DISABLE"] = "1"
os.environ["PYTHONWARNINGS"] = "ignore::RuntimeWarning"  # of a fork for a command, from JAX in the kernel

autodoc_member_order = "bysource"
autodoc_typehints = "description"
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Attributes", "params_style")]  # the attributes of dataclasses are their arguments
autodoc_typehints_description_target = "documented"
toc_object_entries_show_parents = "hide"
