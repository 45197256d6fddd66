"""What a person sees: a live line while it runs, a table at the end."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from forge_trainer.types import Episode

LINES_WITHOUT_TERMINAL = 20
"""Lines of a whole run where there is no terminal to rewrite one on."""
SUMMARY_STEPS = 10
"""Steps that the table's last column is the mean of."""
SUMMARY_KEYS = (
    "reward/mean",
    "trainer/loss",
    "trainer/grad_norm",
    "rollout/logprob_gap",
    "weights/push_s",
    "weights/pull_s",
    "time/step_s",
)


class ConsoleSink:
    """A live progress line on a terminal; some plain lines elsewhere. Use as a sink."""

    def __init__(self, *, steps: int) -> None:
        self._console = Console()
        self._steps = steps
        self._every = max(1, steps // LINES_WITHOUT_TERMINAL)
        self._progress = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=20),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("starting", total=steps)
        self._rounds = 0
        self._progress.start()

    def write_step(self, row: Mapping[str, float], episodes: Sequence[Episode]) -> None:
        self._rounds += 1
        line = describe(row)
        self._progress.update(self._task, completed=self._rounds, description=line)
        is_due = self._rounds % self._every == 0 or self._rounds in (1, self._steps)
        if not self._console.is_terminal and is_due:
            left_s = (self._steps - self._rounds) * row["time/step_s"]
            self._console.print(f"step {row['step']:.0f}/{self._steps}  {line}  {left_s:.0f}s left")

    def write_evaluation(self, row: Mapping[str, float]) -> None:
        self._console.print(describe_evaluation(row), highlight=False)

    def close(self) -> None:
        self._progress.stop()


class SummarySink:
    """Remembers the first and the last steps, and prints them as a table."""

    def __init__(self, run_folder: Path, model_folder: Path) -> None:
        """`model_folder` is told of if the run has made it."""
        self._run_folder = run_folder
        self._model_folder = model_folder
        self._first: list[Mapping[str, float]] = []
        self._last: deque[Mapping[str, float]] = deque(maxlen=SUMMARY_STEPS)
        self._num_steps = 0
        self._evaluated: Mapping[str, float] | None = None

    def write_step(self, row: Mapping[str, float], episodes: Sequence[Episode]) -> None:
        self._num_steps += 1
        self._last.append(dict(row))
        if len(self._first) < SUMMARY_STEPS:
            self._first.append(dict(row))

    def write_evaluation(self, row: Mapping[str, float]) -> None:
        self._evaluated = row

    def close(self) -> None:
        if not self._last:
            return
        table = Table(title=f"{self._num_steps} steps")
        table.add_column("metric")
        table.add_column(f"first {len(self._first)}", justify="right")
        table.add_column(f"last {len(self._last)}", justify="right")
        for key in SUMMARY_KEYS:
            table.add_row(key, _mean_of(self._first, key), _mean_of(self._last, key))
        console = Console()
        console.print(table)
        if self._evaluated is not None:
            console.print(describe_evaluation(self._evaluated), highlight=False)
        console.print(f"run folder: {self._run_folder}", soft_wrap=True, highlight=False)
        if self._model_folder.is_dir():
            console.print(f"trained model: {self._model_folder}", soft_wrap=True, highlight=False)


def describe(row: Mapping[str, float]) -> str:
    """The numbers worth a glance."""
    sync_s = row.get("weights/push_s", 0.0) + row.get("weights/pull_s", 0.0)
    return (
        f"reward {row['reward/mean']:.3f}  loss {row['trainer/loss']:+.4f}  "
        f"{row['trainer/tokens_per_s']:.0f} tok/s  sync {sync_s:.2f}s"
    )


def describe_evaluation(row: Mapping[str, float]) -> str:
    """The numbers of an evaluation in a line."""
    step = f"evaluation at step {row['step']:.0f}"
    if "eval/reward" not in row:
        return f"{step}: no prompt was answered"
    passed = "".join(f"  {k[5:]} {v:.3f}" for k, v in row.items() if k.startswith("eval/pass@"))
    return (
        f"{step}: reward {row['eval/reward']:.3f} "
        f"[{row['eval/reward_low']:.3f}, {row['eval/reward_high']:.3f}]{passed}"
    )


def _mean_of(rows: Sequence[Mapping[str, float]], key: str) -> str:
    values = [row[key] for row in rows if key in row]
    return f"{sum(values) / len(values):.4g}" if values else "-"
