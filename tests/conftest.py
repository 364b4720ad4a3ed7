"""Two CPU devices for every test, as the command line sets them on a two-core machine."""

import jax

jax.config.update("jax_num_cpu_devices", 2)
