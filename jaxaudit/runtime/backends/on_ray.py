"""Runs each call as a task of Ray."""

from __future__ import annotations

import os
import socket
from typing import Any

from jaxaudit.runtime.backends.backend import Ended, Workers
from jaxaudit.runtime.backends.worker import perform
from jaxaudit.runtime.errors import UserError

STORE_BYTES = 80 * 2**20
"""Of Ray's memory for objects where it is begun here: calls hand over a few names."""


ANSWER_SECONDS = 10.0
"""For a cluster's address to answer."""


class OnRay:
    """Ray, connected to or begun here. See `jaxaudit.runtime.backends.backend.Backend`."""

    def __init__(self, asked: Workers):
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            import ray
        except ImportError:
            raise UserError("--on ray needs the extra 'ray': pip install 'jaxaudit[ray]'") from None
        self._ray, self._asked = ray, asked
        given = asked.address or os.environ.get("RAY_ADDRESS", "")
        _check_answers(given)
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        try:
            ray.init(address=asked.address or "auto", **quiet)
        except (ConnectionError, ValueError, RuntimeError) as error:
            if given:
                raise UserError(f"no Ray cluster answers at {given}: {str(error).splitlines()[0]}") from None
            ray.init(address="local", include_dashboard=False, object_store_memory=STORE_BYTES, **quiet)
        room = [self._room(node["Resources"]) for node in ray.nodes() if node["Alive"]]
        if not sum(room):
            self.close()
            raise UserError(f"no node of the Ray cluster has {asked.cpus} CPUs and {asked.gpus} GPUs for a worker")
        self.workers = asked.count or sum(room)
        self.beside = min(self.workers, max(room))
        self._task = ray.remote(
            num_cpus=asked.cpus,
            num_gpus=asked.gpus,
            max_calls=1 if asked.gpus else 0,  # a process keeps its programs for the next call, but no GPU's memory
            max_retries=0,  # who hands it in decides
            scheduling_strategy="SPREAD",
        )(perform)

    def _room(self, resources: dict[str, float]) -> int:
        """Workers a node with such resources has room for."""
        room = resources.get("CPU", 0) // self._asked.cpus
        return int(min(room, resources.get("GPU", 0) // self._asked.gpus) if self._asked.gpus else room)

    def submit(self, call: str, arguments: dict[str, Any]) -> _RayJob:
        return _RayJob(self._ray, self._task.remote(call, arguments, self._asked.cpus, os.getcwd()))

    def close(self) -> None:
        """Ends all that was handed in; of a cluster begun here, everything."""
        self._ray.shutdown()


def _check_answers(address: str) -> None:
    """Raises UserError where nothing listens at HOST:PORT: Ray itself asks again for minutes."""
    host, _, port = address.rpartition("://")[2].partition(":")
    if port.isdigit():
        try:
            socket.create_connection((host, int(port)), ANSWER_SECONDS).close()
        except OSError as error:
            raise UserError(f"no Ray cluster answers at {address}: {error.strerror or error}") from None


class _RayJob:
    def __init__(self, ray: Any, reference: Any):
        self._ray, self._reference = ray, reference

    def ended(self) -> Ended | None:
        if not self._ray.wait([self._reference], timeout=0)[0]:
            return None
        try:
            return Ended(**self._ray.get(self._reference))
        except self._ray.exceptions.RayTaskError as error:  # before the call, e.g. jaxaudit is not there
            return Ended(error=f"a Ray worker could not begin: {str(error).strip().splitlines()[-1]}", code=1)
        except self._ray.exceptions.RayError as error:
            return Ended(lost=f"{type(error).__name__}: {str(error).strip().splitlines()[0]}")

    def cancel(self) -> None:
        """Ends it at once, if it has not ended."""
        self._ray.cancel(self._reference, force=True)
