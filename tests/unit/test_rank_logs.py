"""A process logs to its own file, and its errors to the console with who it is."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
from pathlib import Path

from forge_trainer.processes.rank_logs import RankLogs, controller_log

CODE = """
import logging, sys
from forge_trainer.processes.rank_logs import RankLogs, set_up_logging
set_up_logging(RankLogs(sys.argv[1], sys.argv[2]), mesh="trainer", rank=3)
logger = logging.getLogger("some.module")
logger.debug("told at DEBUG")
logger.info("told at INFO")
try:
    raise OSError("no space left")
except OSError:
    logger.error("save failed", exc_info=True)
"""


def _run(folder: Path, level: str) -> tuple[str, str]:
    """What its file and the console have."""
    arguments = [sys.executable, "-c", CODE, str(folder), level]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert done.stdout == ""
    return (folder / "trainer-3.log").read_text(), done.stderr


def test_errors_reach_the_console_with_the_rank_and_the_file_with_a_traceback(
    tmp_path: Path,
) -> None:
    file, console = _run(tmp_path / "logs", "INFO")
    assert console == "ERROR trainer 3: save failed\n"
    assert "INFO some.module: told at INFO\n" in file
    assert "told at DEBUG" not in file
    assert "ERROR some.module: save failed\nTraceback" in file
    assert "OSError: no space left" in file


def test_a_level_that_tells_all(tmp_path: Path) -> None:
    file, console = _run(tmp_path, "DEBUG")
    assert "told at DEBUG" in file
    assert "told at DEBUG" not in console


def test_the_controller_logs_to_a_file_and_its_console_stays_as_it_is(tmp_path: Path) -> None:
    root = logging.getLogger()
    console, before = logging.StreamHandler(written := io.StringIO()), root.level
    root.addHandler(console)
    root.setLevel(logging.WARNING)
    try:
        with controller_log(RankLogs(str(tmp_path), "INFO")):
            logging.getLogger("some.module").info("who got what")
            logging.getLogger("some.module").warning("a warning")
        logging.getLogger("some.module").info("afterwards")
    finally:
        root.removeHandler(console)
        root.setLevel(before)
    assert written.getvalue() == "a warning\n"
    logged = (tmp_path / "controller.log").read_text()
    assert "who got what" in logged
    assert "afterwards" not in logged
    assert console.level == logging.NOTSET
