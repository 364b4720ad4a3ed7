"""Two CPU devices for every test, as the command line sets them on a two-core machine; a text to train on."""

import jax
import numpy as np
import pytest

from jaxaudit.text import Text

jax.config.update("jax_num_cpu_devices", 2)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A text with structure, and another."""
    folder = tmp_path_factory.mktemp("corpus")
    random = np.random.default_rng(0)
    words = ["training ", "is ", "stable ", "until ", "it ", "falls ", "over. "]
    (folder / "a.txt").write_text("".join(random.choice(words, 4000)))
    (folder / "b.txt").write_text("ZYX" * 500)
    return Text(name=str(folder / "a.txt"), shift=str(folder / "b.txt"))
