"""Tests that GRPO learns the dialogue "hop" on every seed."""

import pytest

import jaxaudit as ja


@pytest.mark.slow
def test_grpo_reaches_0_96_on_hop():
    """Trains for 120 iterations after a warm start to a sampled success of one half; measures 1,024 held-out rows."""
    learner = ja.learners.grpo(
        "hop",
        kl="none",
        kl_coefficient=0.0,
        prompts=16,
        beta2=0.99,
        performance_rows=1024,
        performance_every=2,
        telemetry="basic",
    )
    telemetry = ja.audit(learner, [], seeds=8, steps=120, execution="map").telemetry.isel(condition=0)
    assert float(telemetry.warm_start_success.isel(step=0).max()) < 0.65
    measured = telemetry.performance.isel(step=slice(1, None, 2)).isel(step=slice(-10, None)).mean("step")
    assert float(measured.mean()) >= 0.96
    assert float(measured.min()) >= 0.90
