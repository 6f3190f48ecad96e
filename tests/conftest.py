"""What all tests share: where helpers are found, and how hypothesis searches."""

import pytest
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("conformance")

# Machines that run tests are shared: time limits of single examples would only be noise.
settings.register_profile(
    "offline", deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("offline")
