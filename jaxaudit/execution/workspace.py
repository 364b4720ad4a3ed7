"""Memory that XLA's CPU backend takes while a program runs and its plan of buffers does not count.

Products and what is fused with them run in YNNPACK, which makes room of its own, for a moment: for each result within
the fusion, and for each product. The compiler's memory analysis knows the fusion's inputs and outputs alone.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator

import jax
import jaxlib

COMPUTATION = re.compile(r"^%?(\S+) \(.*\) -> .* \{$")
CALL = re.compile(r'kind=kCustom, calls=%?([^\s,]+).*"kind":"__ynn_fusion"')
INSTRUCTION = re.compile(r"^  (ROOT )?%?(\S+) = (\w+)\[([\d,]*)\]\S* ([\w-]+)\((.*)$")

VIEWS = ("parameter", "bitcast", "broadcast", "constant", "iota", "reshape")
"""Instructions that make no array of their own."""

PACKS_WHOLE = jaxlib.version.__version_info__ < (0, 11)
"""Whether YNNPACK may pack all of a factor at a time, as it did before jaxlib 0.11."""


@functools.lru_cache(maxsize=64)
def workspace_bytes(compiled: jax.stages.Compiled) -> int:
    """The most bytes that a fusion can need; zero where there is none, as on a GPU.

    Seen to be needed of it are from nothing to all: some factors are packed in parts, some results not held whole.
    """
    text = compiled.as_text() or ""
    called = set(CALL.findall(text))
    return max((_fusion_bytes(lines) for name, lines in _computations(text) if name in called), default=0)


def _computations(text: str) -> Iterator[tuple[str, list[str]]]:
    """The computations of a module, by name, as lines."""
    name = ""
    lines: list[str] = []
    for line in text.splitlines():
        if head := COMPUTATION.match(line):
            name, lines = head[1], []
        elif line == "}":
            yield name, lines
        else:
            lines.append(line)


def _fusion_bytes(lines: list[str]) -> int:
    """Of results within a fusion, and of what each product takes besides."""
    sizes, total = {}, 0
    for line in lines:
        if not (found := INSTRUCTION.match(line)):
            continue
        root, name, dtype, shape, kind, rest = found.groups()
        size = sizes[name] = math.prod(int(n) for n in shape.split(",") if n) * _width(dtype)
        if not root and kind not in VIEWS:
            total += size
        if kind == "dot":
            operands = re.findall(r"%([\w.-]+)", rest.partition(")")[0])
            factors = [sizes.get(operand, 0) for operand in operands]
            total += _product_bytes(factors, size, _width(dtype))
    return total


def _product_bytes(factors: list[int], result: int, width: int) -> int:
    """Of the larger factor, packed; or else of the sums in float32 of a result that is narrower."""
    if PACKS_WHOLE:
        return max(factors)
    return result // width * 4 if width < 4 else 0


def _width(dtype: str) -> int:
    """Bytes of a number: of "f32", 4."""
    bits = re.search(r"\d+", dtype)
    return -(-int(bits[0]) // 8) if bits else 1
