"""What GPT-2's head takes of memory beyond the compiler's plan, in a process of its own; one JSON object.

    python head.py

In a process that did much before, what its heap kept is used again, and memory freed meanwhile counts against the peak.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ring

from jaxaudit.execution.workspace import workspace_bytes
from jaxaudit.machine import give_back

ROWS, WIDTH, TOKENS = 248, 768, 50_257


def head(hidden, embedding):
    return jax.nn.log_softmax(hidden @ embedding.T)


def extra(compiled, arguments):
    """Bytes that a call took beyond what the compiler planned."""
    sizes = compiled.memory_analysis()
    give_back()
    held = ring.status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    jax.block_until_ready(compiled(*arguments))
    return ring.status("VmHWM") - held - sizes.temp_size_in_bytes - sizes.output_size_in_bytes


def main():
    arguments = jnp.ones((ROWS, WIDTH)), jnp.ones((TOKENS, WIDTH))
    compiled = jax.jit(head).lower(*arguments).compile()
    most = max(extra(compiled, arguments) for _ in range(4))
    print(json.dumps({"workspace": workspace_bytes(compiled), "extra": most}))


if __name__ == "__main__":
    main()
