"""A mount for as long as a ``with`` block, served by a process of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import IO

from slimckpt.errors import MountError
from slimckpt.model import show_path


@contextlib.contextmanager
def mounted(
    store: str | bytes | os.PathLike[str],
    mountpoint: str | bytes | os.PathLike[str],
    *options: str,
    log: IO[bytes] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Mount a slim checkpoint on an empty directory, and unmount it at the end.

    Parameters
    ----------
    options : str
        Of ``slimckpt mount``: ``"--step", "1000"``.
    log : file, optional
        Where the process writes what it could not read, and why; by default stderr.

    Yields
    ------
    subprocess.Popen
        The process that serves the mount.

    Raises
    ------
    MountError
        It could not be mounted; the log says why.
    """
    # However this process ends, its end of the pipe is closed then, and the mount with it.
    words = ["mount", "--while-stdin", *options, "--", store, mountpoint]
    command = [sys.executable, "-m", "slimckpt", *words]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log) as process:
        try:
            assert process.stdout is not None
            if not process.stdout.readline():
                raise MountError(
                    f"{show_path(os.fsencode(mountpoint))}: `slimckpt mount` ended in code"
                    f" {process.wait()}; what it says stands in its log"
                )
            yield process
        finally:
            process.terminate()
