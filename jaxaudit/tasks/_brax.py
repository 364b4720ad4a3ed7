"""brax's environment interface and MJX, imported without output.

On import, MJX prints to standard output that its optional Warp backend is missing, which would spoil the output of a
command that prints a spec.
"""

import contextlib
import io

with contextlib.redirect_stdout(io.StringIO()):
    from brax import envs as _envs
    from brax.envs.base import Env as Env
    from brax.envs.base import State as State
    from mujoco import mjx as mjx

make_brax = _envs.get_environment


def brax_environments() -> list[str]:
    """Returns the names of the environments that `make_brax` can create."""
    return list(_envs._envs)
