"""Run a benchmark suite: a table, and with --json a file of ratios.

    python -m apps.bench.main --suite logprobs [--json FILE]

Each suite ends within five minutes on two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from apps.bench.measure import Row

SUITES = {
    "ablation": "rollout.ablation",
    "async": "rollout.asynchrony",
    "checkpoint": "checkpoint",
    "controller": "controller",
    "endpoint": "endpoint",
    "fleet": "rollout.fleet",
    "generation": "generation",
    "logprobs": "logprobs",
    "model": "model",
    "pull": "pull",
    "step": "step",
    "trl": "trl",
    "vllm": "rollout.vllm",
    "weights": "weights",
}
"""By name, the module of each."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the app; the process's exit code."""
    parser = argparse.ArgumentParser(prog="python -m apps.bench.main", description=__doc__)
    parser.add_argument("--suite", required=True, choices=list(SUITES))
    parser.add_argument("--json", type=Path, help="write the rows here, too")
    given = parser.parse_args(arguments)
    suite = importlib.import_module(f"apps.bench.suites.{SUITES[given.suite]}")
    rows: list[Row] = asyncio.run(suite.run())
    print_table(given.suite, rows)
    if given.json is not None:
        values = {row.key: dataclasses.asdict(row.spread) for row in rows}
        given.json.write_text(json.dumps(values, indent=2) + "\n")
    return 0


def print_table(suite: str, rows: Sequence[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=suite)
    for column in ("key", "what", "median", "min", "max", "n", "bar"):
        table.add_column(column, no_wrap=column != "what")
    for row in rows:
        spread = row.spread
        numbers = [f"{value:.3f}" for value in (spread.median, spread.min, spread.max)]
        bar = "" if row.bar is None else f"<= {row.bar}"
        bar = bar if row.floor is None else f">= {row.floor}"
        table.add_row(row.key, row.meaning, *numbers, str(spread.n), bar)
    # Wide enough for keys and numbers, also where there is no terminal.
    Console(width=max(Console().width, 120)).print(table)


if __name__ == "__main__":
    sys.exit(main())
