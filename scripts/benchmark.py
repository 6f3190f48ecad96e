"""Measure slimckpt: beside the least that must be done, other tools, and the bars it is held to.

Contenders take turns, each turn in a fresh process, the order going back and forth; a bar is held
against the median. What a command reads is brought into the page cache before every turn, what it
wrote is checked once and deleted. Numbers of different machines do not compare; ratios do, roughly.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
from compileall import compile_dir
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path

from benchmarks import (
    commands,
    loading,
    many_ranks,
    memory,
    merging,
    mounting,
    node_memory_of_frameworks,
    pickles,
    reading,
    resharding,
    torch_loading,
)
from benchmarks.machine import machine
from benchmarks.turns import Result, Verdict
from benchmarks.workshop import Options, Workshop
from make_checkpoint import size

import slimckpt

MEASUREMENTS = {
    "slim": commands.slim,
    "nothing": commands.nothing,
    "restore": commands.restore,
    "verify": commands.verify,
    "analyze": commands.analyze,
    "exact": commands.exact,
    "read": reading.read,
    "open": reading.open_rank,
    "copy": loading.copy,
    "cold": loading.cold,
    "mount": mounting.mount,
    "node": memory.node,
    "torch": torch_loading.torch_loading,
    "frameworks": node_memory_of_frameworks.frameworks,
    "merge": merging.merge,
    "reshard": resharding.reshard,
    "private": memory.private,
    "ranks": many_ranks.ranks,
    "pickles": pickles.pickles,
}
FULL = 2_700_000_000


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmark", description=__doc__)
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help=f"of {', '.join(MEASUREMENTS)}; by default all")
    add("--size", type=size, default=FULL, help="of the main source (2.7G); others scale with it")
    add("--runs", type=int, help="turns of every contender (7; slow ones take 3 at most)")
    add("--quick", action="store_true", help="does it work? one turn, few and small tensors")
    add("--seed", type=int, default=0, help="of the synthetic checkpoints (0)")
    add("--json", type=Path, metavar="FILE", help="also write everything to this file")
    add("--markdown", type=Path, metavar="FILE", help="also write the table of bars to this file")
    options = parser.parse_args()
    if unknown := set(options.names) - set(MEASUREMENTS):
        parser.error(f"no measurement {', '.join(sorted(unknown))}")
    runs = options.runs or (1 if options.quick else 7)
    if runs < 1:
        parser.error("--runs must be at least 1")
    scale = Fraction(options.size, FULL) / (100 if options.quick else 1)
    # As where slimckpt is installed: modules are not compiled at every start.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    compile_dir(Path(slimckpt.__file__).parent, quiet=1)
    chosen = Options(runs, options.seed, scale, options.quick)
    facts = machine()
    print("\n".join(f"{key}: {value}" for key, value in facts.items()))
    found: dict[str, Result] = {}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("benchmark: stopped"))
    try:
        for name in options.names or MEASUREMENTS:
            print(f"measuring {name}", file=sys.stderr)
            with tempfile.TemporaryDirectory(prefix="slimckpt-benchmark.") as place:
                found[name] = MEASUREMENTS[name](Workshop(Path(place).resolve(), chosen))
            print("\n" + "\n".join(table(found[name])), flush=True)
    finally:  # where one fails, what was measured before is not lost
        verdicts = [verdict for result in found.values() for verdict in result.verdicts]
        print("\n" + "\n".join(map(line, verdicts)))
        if options.json:
            report = {
                "machine": facts,
                "options": asdict(chosen) | {"scale": float(scale)},
                "measurements": {name: result.as_json() for name, result in found.items()},
            }
            options.json.write_text(json.dumps(report, indent=1) + "\n")
        if options.markdown:
            options.markdown.write_text(markdown(verdicts))


def table(result: Result) -> list[str]:
    """Lines that show the smallest and the median figure of every contender."""
    lines = [result.what, f"  {'':42}{'':12}{'min':>10}{'median':>10}{'turns':>7}"]
    for name, turns in result.turns.items():
        for key in turns[0]:
            figures = [turn[key] for turn in turns]
            lines.append(
                f"  {name:42}{key:12}{min(figures):10.4g}{statistics.median(figures):10.4g}"
                f"{len(figures):7}"
            )
            name = ""
    lines += [f"  {name:42}not measured: {why}" for name, why in result.missing.items()]
    lines += [f"  {name}: {fact}" for name, fact in result.facts.items()]
    return lines


def line(verdict: Verdict) -> str:
    says = "holds" if verdict.holds else "FAILS"
    least = "" if verdict.by_minima is None else f" ({show(verdict.by_minima)} by minima)"
    figure = f"{show(verdict.figure)} {verdict.unit}{least}"
    return f"{says}  {verdict.what}: {figure}, bar {verdict.bar:g}"


def show(figure: float) -> str:
    return f"{figure:.2f}" if figure < 10 else f"{figure:.0f}"


def markdown(verdicts: list[Verdict]) -> str:
    """The bars as a table for the README."""
    lines = ["| what | figure | bar | holds |", "|---|---|---|---|"]
    for verdict in verdicts:
        lines.append(
            f"| {verdict.what} | {show(verdict.figure)} {verdict.unit} | {verdict.bar:g}"
            f" | {'yes' if verdict.holds else '**no**'} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
