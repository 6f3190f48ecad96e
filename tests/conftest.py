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

# Started in the background of a shell, these are ignored, and would be by the commands under test.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)
