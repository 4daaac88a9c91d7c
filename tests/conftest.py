"""What holds for every test: a machine that is busy fails none of them."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# Time says nothing here: cores are shared, and Hypothesis' first imports count as slow generation.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
