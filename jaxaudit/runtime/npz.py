"""NumPy archives (`.npz`) that somebody else may have written: nothing is unpickled, and nothing inflates."""

from __future__ import annotations

import math
import zipfile
from pathlib import Path
from typing import IO

import numpy as np

from jaxaudit.runtime.errors import UserError
from jaxaudit.runtime.files import check_regular


def read(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an archive that `numpy.savez` wrote, by name.

    The archive is refused before any array is allocated if its arrays would take more memory than the file takes on
    disk: its members are not compressed, and each is as long as its header says.

    Raises:
      UserError: it is not an archive, or holds anything else.
      OSError: it cannot be read.
    """
    check_regular(path)
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            if any(one.compress_type != zipfile.ZIP_STORED for one in members):
                raise ValueError("a member is compressed")
            if sum(one.file_size for one in members) > path.stat().st_size:
                raise ValueError("its members are longer than the file")
            found = {}
            for one in members:
                with archive.open(one) as file:
                    found[one.filename.removesuffix(".npy")] = _array(file, one.file_size)
            return found
    except (ValueError, EOFError, zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        # A damaged archive has zipfile speak of encryption, too (RuntimeError), or of an unknown version.
        raise UserError(f"{path} is damaged: {str(error).splitlines()[0]}") from None


def _array(file: IO[bytes], size: int) -> np.ndarray:
    """The array in an archive's member of `size` bytes. Raises ValueError."""
    version = np.lib.format.read_magic(file)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        raise ValueError(f"an array has format {version}")
    shape, fortran, dtype = readers[version](file)
    if dtype.hasobject:
        raise ValueError("an array holds Python objects, which are never unpickled")
    count = math.prod(shape)
    if count * dtype.itemsize != size - file.tell():
        raise ValueError("an array is not as long as its header says")
    values = np.frombuffer(file.read(), dtype).copy() if dtype.itemsize else np.zeros(count, dtype)
    return values.reshape(shape, order="F" if fortran else "C")
