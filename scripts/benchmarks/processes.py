"""Turns that are whole processes, start-up included, and what memory they take."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.turns import Figures, stop
from benchmarks.workshop import Workshop, bytes_on_disk, call, read_all

SAMPLE_EVERY = 0.001
MEMORY = re.compile(rb"VmHWM:\s+(\d+) kB.*RssAnon:\s+(\d+) kB", re.DOTALL)


@dataclass
class Command:
    """One turn of a program, whose source is read first so that it lies in the page cache.

    Parameters
    ----------
    out
        What it writes; removed after the turn.
    prepare
        Run before the clock starts.
    check
        Given what the first turn printed, while ``out`` is there. It stops the benchmark if the
        result is wrong.
    code
        The exit code it should end in.
    """

    arguments: list[object]
    source: Path | None = None
    out: Path | None = None
    prepare: list[object] | None = None
    check: Callable[[str], None] | None = None
    code: int = 0
    environment: dict[str, str] = field(default_factory=dict)
    memory: bool = False

    def __call__(self) -> Figures:
        environment = {**os.environ, **self.environment}
        if self.prepare:
            call(self.prepare, env=environment)
        if self.out:
            os.sync()
        if self.source:
            read_all(self.source)
        start = time.perf_counter()
        figures = {}
        if self.memory:
            printed, figures = watch(self.arguments, self.code)
        else:
            printed = call(self.arguments, self.code, env=environment)
        figures["s"] = time.perf_counter() - start
        if self.check:
            self.check(printed)
            self.check = None
        if self.out and self.out.exists():
            figures["MB written"] = bytes_on_disk(self.out) / 1e6
            shutil.rmtree(self.out) if self.out.is_dir() else self.out.unlink()
        return figures


def watch(command: list[object], code: int) -> tuple[str, Figures]:
    """Run a command; what it prints, and its largest private (``RssAnon``) and whole memory in MB.

    Private memory is read from ``/proc/PID/status`` every millisecond: a peak that is shorter can
    be missed. The largest whole one (``VmHWM``) is the kernel's own count, of mapped pages too.
    """
    words = [str(word) for word in command]
    private = whole = 0
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        output: list[str] = []
        reader = threading.Thread(target=lambda: output.extend(process.communicate()))
        reader.start()
        try:
            with Path(f"/proc/{process.pid}/status").open("rb", buffering=0) as status:
                while reader.is_alive():
                    status.seek(0)
                    if found := MEMORY.search(status.read()):
                        whole, private = int(found[1]), max(private, int(found[2]))
                    reader.join(SAMPLE_EVERY)
        except ProcessLookupError:
            pass  # it has ended
        except BaseException:
            process.kill()
            raise
        reader.join()
    if process.returncode != code:
        stop(f"{' '.join(words)} ended in {process.returncode}, not {code}\n{output[1]}")
    return output[0], {"MB private": private * 1024 / 1e6, "MB whole": whole * 1024 / 1e6}


def memory_held(
    readers: Sequence[list[object]],
    sums: Sequence[int],
    environment: Mapping[str, str] | None = None,
) -> int:
    """Run readers with ``hold`` side by side: the sum of their proportional set sizes (PSS) when
    they have touched everything, above that when they have only imported what they need, in bytes.

    The benchmark stops unless they print ``sums``.
    """
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [str(word) for word in reader],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env={**os.environ, **(environment or {})},
                )
            )
            for reader in readers
        ]

        def all_of_them(answer: bool) -> list[str]:
            """Let each go on, and wait until each has said something."""
            for process in processes:
                assert process.stdin
                if answer:
                    process.stdin.write("\n")
                    process.stdin.flush()
            return [process.stdout.readline() for process in processes if process.stdout]

        all_of_them(answer=False)
        before = sum(_pss(process.pid) for process in processes)
        said = all_of_them(answer=True)
        after = sum(_pss(process.pid) for process in processes)
        for reader, line, expected in zip(readers, said, sums, strict=True):
            if not line or json.loads(line)["sum"] != expected:
                stop(f"{' '.join(map(str, reader))} does not read what is in the source")
        all_of_them(answer=True)
    return after - before


def _pss(process: int) -> int:
    text = Path(f"/proc/{process}/smaps_rollup").read_text()
    found = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
    assert found
    return int(found[1]) * 1024


def same_trees(one: Path, other: Path) -> None:
    """Stop the benchmark unless two trees have the same contents."""
    call(["diff", "-r", "--no-dereference", one, other])


def gives_back(
    workshop: Workshop,
    source: Path,
    extract: Callable[[Path], list[object]],
    inside: str = "",
    **options: object,
) -> Callable[[str], None]:
    """A check: what ``extract`` writes to a new directory is the source again."""

    def check(_: str) -> None:
        back = workshop.new("back")
        call(extract(back), **options)
        same_trees(source, back / inside)
        shutil.rmtree(back)

    return check
