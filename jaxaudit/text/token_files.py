"""Files of tokens: nanoGPT's, 16-bit numbers and nothing else, and llm.c's, which have a header before them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

SUFFIX = ".bin"
HEADER = 256
"""32-bit numbers in llm.c's header: magic, version, tokens, zeros."""

MAGIC, VERSION = 20240520, 1
OTHER_MAGICS = {
    20240801: "llm.c's tokens of 32 bits",
    20240326: "llm.c's parameters",
    20240522: "llm.c's evaluation data",
}


def read(path: Path) -> np.ndarray:
    """A file's tokens, uint16 `[N]`, mapped and not copied.

    Raises:
      ValueError: in one sentence: empty, cut off, or another kind of file.
    """
    size = path.stat().st_size
    if not size:
        raise ValueError(f"{path} is empty")
    if size % 2:
        raise ValueError(f"{path} has {size} bytes, which is no whole number of 16-bit tokens")
    words = np.memmap(path, np.uint16, "r")
    if not _has_header(words):
        return words
    if len(words) < 2 * HEADER:
        raise ValueError(f"{path} is cut off within its header")
    header = np.asarray(words[: 2 * HEADER]).view(np.int32)
    if header[0] != MAGIC:
        what = OTHER_MAGICS.get(int(header[0]), "no data of llm.c's that is known")
        raise ValueError(f"{path} begins with the number {header[0]}, not {MAGIC}: {what}")
    if header[1] != VERSION:
        raise ValueError(f"{path} has version {header[1]} of llm.c's format; {VERSION} can be read")
    tokens = words[2 * HEADER :]
    if len(tokens) != header[2]:
        what = "cut off" if len(tokens) < header[2] else "longer than that"
        raise ValueError(f"{path} should hold {header[2]} tokens by its header and is {what}: it holds {len(tokens)}")
    return tokens


def _has_header(words: np.ndarray) -> bool:
    """Whether a file begins as llm.c's do; a text's tokens have no thousand zero bytes so near their beginning."""
    begin = np.asarray(words[: 2 * HEADER])
    if len(begin) < 2 * HEADER:
        return len(begin) >= 2 and int(begin[:2].view(np.int32)[0]) == MAGIC
    return int(begin[:2].view(np.int32)[0]) == MAGIC or bool(begin[:2].any() and not begin[6:].any())
