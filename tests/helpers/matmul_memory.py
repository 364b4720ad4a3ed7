"""Measures the memory that two matrix products take beyond the compiler's plan, and prints one JSON object.

    python matmul_memory.py

This runs in a fresh process. In a process that has allocated before, the heap reuses memory that it kept, and memory
that is freed meanwhile counts against the peak.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ring_buffer_memory

from jaxaudit.execution.engine import workspace_bytes
from jaxaudit.runtime.machine import release_memory

ROWS, WIDTH, TOKENS = 248, 768, 50_257


def output_log_probs(hidden, embedding):
    return jax.nn.log_softmax(hidden @ embedding.T)


def unplanned_bytes(compiled, arguments):
    """Returns the bytes that a call took beyond what the compiler planned."""
    sizes = compiled.memory_analysis()
    release_memory()
    resident = ring_buffer_memory.memory_status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # count the peak from here
    jax.block_until_ready(compiled(*arguments))
    return ring_buffer_memory.memory_status("VmHWM") - resident - sizes.temp_size_in_bytes - sizes.output_size_in_bytes


def measure_memory(function, *arguments):
    """Returns the planned size of a function's workspace, and the most bytes that it took beyond the plan."""
    compiled = jax.jit(function).lower(*arguments).compile()
    return {
        "workspace": workspace_bytes(compiled),
        "extra": max(unplanned_bytes(compiled, arguments) for _ in range(4)),
    }


def main():
    sizes = measure_memory(output_log_probs, jnp.ones((ROWS, WIDTH)), jnp.ones((TOKENS, WIDTH)))
    arguments = jnp.ones((4 * ROWS, WIDTH), jnp.bfloat16), jnp.ones((WIDTH, 16 * WIDTH), jnp.bfloat16)
    bfloat16_sizes = measure_memory(jnp.matmul, *arguments)
    print(json.dumps(sizes | {f"{name} in bfloat16": size for name, size in bfloat16_sizes.items()}))


if __name__ == "__main__":
    main()
