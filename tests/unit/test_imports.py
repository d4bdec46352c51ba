"""Who may import whom: what is shipped into the pods needs nothing else, and the two halves of the program don't know each other."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = {"training", "infra", "workloads", "ops", "config", "versions", "benchmarks", "tests"}
ALLOWED = {
    "training": {"training"},
    "infra": {"infra", "config", "versions"},
    "workloads": {"workloads", "config", "versions"},
    "ops": {"ops", "config", "versions", "workloads", "training.transport", "training.record", "training.faults"},
    "benchmarks": {"benchmarks", "training"},
}


def imported(file: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import; write the whole name, so that this test can read it"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("package", [name for name in ALLOWED if (ROOT / name).is_dir()])
def test_a_package_imports_only_what_it_may(package: str) -> None:
    for file in sorted((ROOT / package).rglob("*.py")):
        for name in imported(file):
            if name.split(".")[0] in OURS:
                allowed = any(name == a or name.startswith(a + ".") for a in ALLOWED[package])
                assert allowed, f"{file.relative_to(ROOT)} imports {name}; {package} may import {sorted(ALLOWED[package])}"


def test_training_never_imports_pulumi() -> None:
    for file in sorted((ROOT / "training").rglob("*.py")):
        assert not [name for name in imported(file) if name.split(".")[0].startswith("pulumi")], f"{file}: Pulumi is not in the image"


def test_the_transport_gate_needs_nothing_but_python() -> None:
    import sys

    for file in sorted((ROOT / "training" / "transport").rglob("*.py")):
        for name in imported(file):
            top = name.split(".")[0]
            assert top in sys.stdlib_module_names or name.startswith(("training.transport", "training.errors")), f"{file.name} imports {name}"
