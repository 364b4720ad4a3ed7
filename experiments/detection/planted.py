"""Simulated telemetry of a known process, with a disturbance that begins at a known step."""

import numpy as np
import pandas as pd

from jaxaudit.monitoring.labelled_lanes import LabelledLanes

CHANNELS = 12
STEPS, ONSET = 200, 80
LATE = 4
"""The number of channels that "timing" delays."""

OFTEN = 0.05
"""The share of steps with a spike."""

SIZES = {
    "drift": 0.5,
    "ramp": 1.5,
    "fold": 0.05,
    "tempo": 0.1,
    "timing": 2,
    "spikes": 4,
    "dropouts": 0.7,
    "stuck": 0.85,
}
"""The size of each kind of change, in the units of `System.runs`; some chart detects at least 92% of the runs."""


class System:
    """Twelve autoregressive channels that share three sources of noise."""

    def __init__(self, seed=7):
        random = np.random.default_rng(seed)
        self.decay = random.uniform(0.5, 0.9, CHANNELS)
        self.loading = 0.6 * random.normal(size=(CHANNELS, 3))
        self.sign = random.choice([-1, 1], CHANNELS)
        self.std = np.sqrt((1 + (self.loading**2).sum(1)) / (1 - self.decay**2))

    def runs(self, count, seed, kind="clean", size=0.0):
        """Simulates runs `[count, STEPS, CHANNELS]` that are disturbed from ONSET on.

        The kinds are:
        "drift": every channel moves by `size` of its standard deviations within 40 steps.
        "ramp": the noise of the first channel grows by the factor 1 + `size` within 80 steps.
        "fold": the decay of the first channel rises to 1, as before a saddle-node bifurcation, and beyond.
        "tempo": the decay of every channel is `size`, with noise that keeps mean and covariance at each step.
        "timing": the first LATE channels are delayed by `size` steps.
        "spikes": the first channel deviates by `size` standard deviations, up or down, at a share OFTEN of the steps.
        "dropouts": the first channel is 0, its mean, at a share `size` of the steps.
        "stuck": the first channel repeats its last value at a share `size` of the steps.
        """
        random = np.random.default_rng(seed)
        x, rows = np.zeros((count, CHANNELS)), np.empty((count, STEPS, CHANNELS))
        for t in range(-60, STEPS):
            steps_since = max(t - ONSET, 0)
            noise = random.normal(size=(count, CHANNELS)) + random.normal(size=(count, 3)) @ self.loading.T
            decay = np.tile(self.decay, (count, 1))
            if kind == "ramp":
                noise[:, 0] *= 1 + size * min(steps_since / 80, 1)
            if kind == "fold":
                decay[:, 0] += (1.0 + size - decay[:, 0]) * min(steps_since / 100, 1)
            if kind == "tempo" and t >= ONSET:
                decay[:] = size
                stationary = np.linalg.cholesky((1 - size**2) * self.covariance())
                noise = random.normal(size=(count, CHANNELS)) @ stationary.T
            x = x * decay + noise
            if t >= 0:
                rows[:, t] = x
        if kind == "drift":
            rows[:, ONSET:] += size * self.std * self.sign * np.clip(np.arange(STEPS - ONSET) / 40, 0, 1)[:, None]
        disturbed = rows[:, ONSET:]
        if kind == "timing":
            disturbed[..., :LATE] = rows[:, ONSET - size : STEPS - size, :LATE].copy()
        chance = random.random((count, STEPS - ONSET))
        if kind == "spikes":
            disturbed[..., 0] += np.where(chance < OFTEN, size * self.std[0] * np.where(chance < OFTEN / 2, 1, -1), 0)
        if kind == "dropouts":
            disturbed[chance < size, 0] = 0
        if kind == "stuck":
            for t in range(ONSET, STEPS):
                stuck = chance[:, t - ONSET] < size
                rows[stuck, t, 0] = rows[stuck, t - 1, 0]
        return rows.astype(np.float32)

    def covariance(self):
        """Returns the covariance of the channels at a step, `[CHANNELS, CHANNELS]`."""
        noise = np.eye(CHANNELS) + self.loading @ self.loading.T
        return noise / (1 - np.outer(self.decay, self.decay))

    def lanes(self, clean, disturbed, seed=0, **kinds):
        """Returns `LabelledLanes` of clean runs, and of disturbed runs for each kind and size, all with other seeds."""
        parts = [self.runs(clean, seed)]
        table = [{"seed": i, "clean": True, "condition": "control"} for i in range(clean)]
        for number, (kind, size) in enumerate(kinds.items(), 1):
            parts.append(self.runs(disturbed, seed + 1000 * number, kind, size))
            first = len(table)
            table += [{"seed": first + i, "clean": False, "condition": kind} for i in range(disturbed)]
        rows = pd.DataFrame(table).assign(magnitude=1.0, onset=ONSET, collapse_time=np.inf)
        names = ("performance", "gradient_norm", *(f"c{i}" for i in range(CHANNELS - 2)))
        return LabelledLanes("planted", names, np.concatenate(parts), rows.assign(perturbation=rows.condition))
