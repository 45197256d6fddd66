"""House rules that import contracts cannot state: sizes, where effects live, the README's tree."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted(
    path for folder in ("forge_trainer", "apps") for path in (ROOT / folder).rglob("*.py")
)
MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 60
MAX_MODULES = 12
ADVERBS = {"call", "call_one", "broadcast", "choose", "stream"}


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _nodes(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text()))


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_files_and_functions_stay_small(path: Path) -> None:
    lines = path.read_text().count("\n")
    assert lines <= MAX_FILE_LINES, f"{_name(path)} has {lines} lines: look for the seam"
    for node in _nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            size = (node.end_lineno or node.lineno) - node.lineno + 1
            assert size <= MAX_FUNCTION_LINES, f"{_name(path)}: {node.name} has {size} lines"


def test_a_folder_holds_a_dozen_modules_at_most() -> None:
    rooms = Counter(path.parent for path in SOURCES if path.name != "__init__.py")
    full = {_name(folder): number for folder, number in rooms.items() if number > MAX_MODULES}
    assert full == {}, "move a wall before the next thing goes in"


def _sets_environment(node: ast.AST) -> bool:
    """`os.environ[...] = `, `os.environ.update(...)` and the like, `os.putenv(...)`."""
    if isinstance(node, ast.Assign):
        return any(ast.unparse(target).startswith("os.environ[") for target in node.targets)
    if isinstance(node, ast.Call):
        return bool(
            re.match(
                r"os\.(environ\.(update|setdefault|pop|clear)|putenv|unsetenv)$",
                ast.unparse(node.func),
            )
        )
    return False


def test_environment_variables_are_set_in_two_places() -> None:
    setters = {_name(path) for path in SOURCES for node in _nodes(path) if _sets_environment(node)}
    processes = "forge_trainer/processes"
    assert setters == {f"{processes}/meshes.py", f"{processes}/hosts/certificates.py"}


def test_only_handles_call_endpoints() -> None:
    """Monarch's adverbs, on anything that is not the project's own `RankCalls` or `BatchDealer`."""
    callers = {
        _name(path)
        for path in SOURCES
        for node in _nodes(path)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ADVERBS
        and not ast.unparse(node.func.value).endswith(("_ranks", "_batches"))
        and ast.unparse(node.func) != "self.call"
    }
    assert callers == {
        "forge_trainer/processes/handles.py",
        "forge_trainer/processes/generator_handle.py",
        # Of hosts, which run no part of ours.
        "forge_trainer/processes/hosts/guards.py",
        # Of torchstore's actors, which are nobody else's.
        "forge_trainer/weights/torchstore/volumes.py",
    }


def test_nothing_prints_but_apps() -> None:
    printers = {
        _name(path)
        for path in SOURCES
        for node in _nodes(path)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "print"
    }
    assert {name for name in printers if not name.startswith("apps/")} <= {
        "forge_trainer/config/load.py"  # --help
    }


def test_every_module_says_its_one_job() -> None:
    silent = [_name(path) for path in SOURCES if not ast.get_docstring(ast.parse(path.read_text()))]
    assert silent == []


def _tree_in_readme() -> set[str]:
    """Files and folders that the README's tree names, as paths from the root.

    Two spaces divide names from what is said about them; an indented line belongs to the folder
    above it.
    """
    block = (ROOT / "README.md").read_text().split("## What lies where")[1].split("```")[1]
    named: set[str] = set()
    folder = ""
    for line in block.strip().splitlines():
        names = re.split(r"\s{2,}", line.strip())[0].split()
        if line.startswith("  "):
            named |= {folder + name for name in names}
        else:
            (folder,) = names
            named.add(folder)
    return named


def test_the_tree_in_the_readme_is_the_tree_of_the_files() -> None:
    named = _tree_in_readme()
    missing = [name for name in named if not (ROOT / name).exists()]
    assert missing == [], "the README names what is not there"
    rooms = {
        f"forge_trainer/{path.name}{'/' if path.is_dir() else ''}"
        for path in (ROOT / "forge_trainer").iterdir()
        if not path.name.startswith("__")
    }
    assert rooms <= named, f"the README leaves out {sorted(rooms - named)}"


def test_documents_link_to_files_that_exist() -> None:
    for document in [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


@pytest.mark.parametrize(
    "module",
    ["forge_trainer", "apps.grpo.main", "apps.weights.main", "forge_trainer.config.load"],
)
def test_importing_loads_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'monarch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
