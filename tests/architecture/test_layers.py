"""The import law of DESIGN section 2, read off the syntax trees, into functions too."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "surefoot"
RANK = {
    "config": 0,
    "data": 1, "model": 1, "guard": 1, "recipes": 1,
    "monitor": 2, "parallel": 2,
    "optim": 3,
    "train": 4,
    "interop": 5, "proof": 5, "scale": 5,
    "cli": 6,
}  # fmt: skip
NO_TORCH_FOLDERS = {"config", "guard", "recipes", "monitor"}
NO_TORCH_FILES = {
    "model/count.py", "optim/schedule.py", "scale/fit.py", "scale/plan.py",
    "data/source.py", "data/tokenizer.py", "data/shards.py", "data/errors.py",
}  # fmt: skip
TORCH_EXTRAS = {"monitor/trackers.py"}
"""Files that may import a torch module inside a function, for an optional third-party package."""
DISTRIBUTED_FILES = {
    "train/setup.py",
    "train/snapshot.py",
    "train/staging.py",
    "train/unpickle.py",
    "proof/rehearsal.py",
}
"""Beside parallel/ and train/checkpoint*.py, the files that may name torch.distributed."""
MODULES = sorted(SOURCE.rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def imports(path: Path) -> list[tuple[str, bool]]:
    """Every imported module, and whether the import stands inside a function."""
    tree = ast.parse(path.read_text())
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(function)
    }
    found: list[tuple[str, bool]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in inside) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}:{node.lineno} imports relatively"
            found.append((node.module or "", id(node) in inside))
    return found


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_imports_go_down(path: Path) -> None:
    folder = relative(path).split("/")[0]
    for module, _ in imports(path):
        if not module.startswith("surefoot."):
            continue
        target = module.split(".")[1]
        if target == folder:
            continue
        assert RANK[target] < RANK[folder], (
            f"{relative(path)} (rank {RANK[folder]}) imports {module} (rank {RANK[target]})"
        )


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_only_the_command_line_imports_our_own_modules_inside_functions(path: Path) -> None:
    if relative(path).startswith("cli/"):
        return
    late = [m for m, inside in imports(path) if inside and m.startswith("surefoot")]
    assert not late, f"{relative(path)} imports {late} inside a function"


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_what_must_answer_at_once_imports_no_torch(path: Path) -> None:
    name = relative(path)
    folder = name.split("/")[0]
    torch_imports = [(m, inside) for m, inside in imports(path) if m.split(".")[0] == "torch"]
    if folder == "cli" or name in TORCH_EXTRAS:
        assert all(inside for _, inside in torch_imports), f"{name} imports torch at the top"
    elif folder in NO_TORCH_FOLDERS or name in NO_TORCH_FILES:
        assert not torch_imports, f"{name} imports torch"


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_torch_distributed_stays_in_parallel_and_in_trains_checkpoints(path: Path) -> None:
    name = relative(path)
    if name.startswith(("parallel/", "train/checkpoint", "optim/clip")) or name in DISTRIBUTED_FILES:
        return
    named = [m for m, _ in imports(path) if m.startswith("torch.distributed")]
    assert not named, f"{name} imports {named}"


def test_package_files_hold_a_docstring_and_nothing_else() -> None:
    for path in SOURCE.rglob("__init__.py"):
        body = ast.parse(path.read_text()).body
        assert len(body) == 1, f"{relative(path)} holds more than its docstring"
        assert isinstance(body[0], ast.Expr), f"{relative(path)} has no docstring"
