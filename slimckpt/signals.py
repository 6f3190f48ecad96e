"""The signals that stop a command, and what a command that was stopped says."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOPPED = "slimckpt: stopped; nothing was kept. Run it again"


def on_stop(handler: Callable[[int, FrameType | None], Any]) -> None:
    """Call ``handler`` when a signal asks to stop, except for signals that are ignored (nohup)."""
    for number in STOPPING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)
