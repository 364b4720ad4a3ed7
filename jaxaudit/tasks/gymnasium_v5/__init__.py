"""The Gymnasium v5 MuJoCo tasks, each written once for every physics engine.

Observation, reward and termination take arrays with any leading batch axes, and work alike on NumPy float64
(in C MuJoCo's host callback) and on traced JAX arrays (MJX). The parts of a reward carry the names of
Gymnasium's `info`.
"""

from jaxaudit.tasks.gymnasium_v5.ant import ANT
from jaxaudit.tasks.gymnasium_v5.arms import PUSHER, REACHER
from jaxaudit.tasks.gymnasium_v5.humanoids import HUMANOID, HUMANOID_STANDUP
from jaxaudit.tasks.gymnasium_v5.pendulums import INVERTED_DOUBLE_PENDULUM, INVERTED_PENDULUM
from jaxaudit.tasks.gymnasium_v5.runners import HALF_CHEETAH, HOPPER, SWIMMER, WALKER2D

ALL = (
    ANT,
    HALF_CHEETAH,
    HOPPER,
    HUMANOID,
    HUMANOID_STANDUP,
    INVERTED_DOUBLE_PENDULUM,
    INVERTED_PENDULUM,
    PUSHER,
    REACHER,
    SWIMMER,
    WALKER2D,
)
