"""What two products take of memory beyond the compiler's plan, in a process of its own; one JSON object.

    python head.py

In a process that did much before, what its heap kept is used again, and memory freed meanwhile counts against the peak.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ring

from jaxaudit.execution.engine import workspace_bytes
from jaxaudit.runtime.machine import release_memory

ROWS, WIDTH, TOKENS = 248, 768, 50_257


def head(hidden, embedding):
    return jax.nn.log_softmax(hidden @ embedding.T)


def extra(compiled, arguments):
    """Bytes that a call took beyond what the compiler planned."""
    sizes = compiled.memory_analysis()
    release_memory()
    held = ring.status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    jax.block_until_ready(compiled(*arguments))
    return ring.status("VmHWM") - held - sizes.temp_size_in_bytes - sizes.output_size_in_bytes


def measured(function, *arguments):
    """What was planned for a function's workspace, and the most that it took."""
    compiled = jax.jit(function).lower(*arguments).compile()
    return {"workspace": workspace_bytes(compiled), "extra": max(extra(compiled, arguments) for _ in range(4))}


def main():
    found = measured(head, jnp.ones((ROWS, WIDTH)), jnp.ones((TOKENS, WIDTH)))
    half = jnp.ones((4 * ROWS, WIDTH), jnp.bfloat16), jnp.ones((WIDTH, 16 * WIDTH), jnp.bfloat16)
    narrow = measured(jnp.matmul, *half)
    print(json.dumps(found | {f"{name} in bfloat16": size for name, size in narrow.items()}))


if __name__ == "__main__":
    main()
