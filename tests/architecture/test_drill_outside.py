"""The guard is judged by faults it knows nothing of: what runs in production never imports the proofs nor names a fault."""

import ast
import re
from pathlib import Path

import pytest

from surefoot.proof.fault_catalogue import CATALOGUE

SOURCE = Path(__file__).parents[2] / "src" / "surefoot"
JUDGED = sorted(
    path
    for folder in ("guard", "config", "train", "data", "optim", "monitor")
    for path in (SOURCE / folder).rglob("*.py")
)
GENERAL = {"random_tokens", "no_warmup"}
"""Names that may mean something else; none may be written as a text even so."""


def relative(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


@pytest.mark.parametrize("path", JUDGED, ids=relative)
def test_nothing_that_is_judged_imports_the_proofs(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert not (node.module or "").startswith("surefoot.proof")
        if isinstance(node, ast.Import):
            assert not any(alias.name.startswith("surefoot.proof") for alias in node.names)


@pytest.mark.parametrize("path", JUDGED, ids=relative)
def test_nothing_that_is_judged_names_a_fault_or_the_drill(path: Path) -> None:
    tree = ast.parse(path.read_text())
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    words = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    words |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names = {fault.name for fault in CATALOGUE}
    assert not names & texts
    assert not (names - GENERAL) & words
    docstrings = " ".join(
        ast.get_docstring(n) or "" for n in ast.walk(tree) if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef)
    )
    assert not re.search(r"\bdrill-[AB]\b|fault_catalogue|Dose\b", " ".join(texts) + docstrings)


def test_the_guard_knows_no_recipe_of_the_drill() -> None:
    for path in JUDGED:
        assert "drill-quick" not in path.read_text(), relative(path)
