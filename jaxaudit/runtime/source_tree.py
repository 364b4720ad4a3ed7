"""Running from a source tree that is on the path and was not installed.

Two things are missing then: the package's metadata, which says its version, and the mapping of the tree's folder
`kernels` to `jaxaudit.kernels`, which `pyproject.toml` asks the installer for.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import metadata
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

PACKAGE = Path(__file__).parents[1]
KERNELS = PACKAGE.parent / "kernels"


class KernelsFinder:
    """Finds `jaxaudit.kernels` in a source tree's folder `kernels`, and nothing else.

    Nothing is found under the name `kernels` through it, which belongs to another package.
    """

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The specification of `jaxaudit.kernels`; its modules are found through it as usual. None for other names."""
        if name != "jaxaudit.kernels":
            return None
        return spec_from_file_location(name, KERNELS / "__init__.py", submodule_search_locations=[str(KERNELS)])


def find_kernels() -> None:
    """Lets `jaxaudit.kernels` be imported from a source tree; an installed package is left as it is.

    The finder is the last to be asked, so that an editable installation's own comes first.
    """
    in_place = (PACKAGE / "kernels").is_dir()
    if not in_place and (KERNELS / "__init__.py").is_file() and KernelsFinder not in sys.meta_path:
        sys.meta_path.append(KernelsFinder)


def version() -> str:
    """The version of the installed package; of a source tree that is not installed its own, and that it is one."""
    try:
        return metadata.version("jaxaudit")
    except metadata.PackageNotFoundError:
        from jaxaudit import __version__

        return f"{__version__} (source tree)"
