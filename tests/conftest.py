"""What all tests share: where helpers are found, and how hypothesis searches."""

import signal

import pytest
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("conformance")

# Machines that run tests are shared: time limits of single examples would only be noise.
settings.register_profile(
    "offline", deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("offline")

# Started in the background of a shell, Ctrl-C is ignored, and would be by the commands under test.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
