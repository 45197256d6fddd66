"""The benchmarks over processes run, and leave none."""

from __future__ import annotations

import json
from pathlib import Path

from tests.e2e.apps import run_app


def test_the_endpoint_suite_runs_and_leaves_nothing(tmp_path: Path) -> None:
    file = tmp_path / "endpoint.json"
    code, out, err = run_app("apps.bench.main", "--suite", "endpoint", "--json", str(file))
    assert (code, err) == (0, ""), err
    assert "get_status" in out
    assert json.loads(file.read_text())["call_over_pipe_ms"]["n"] == 200
