"""Nothing that came over a wire or from a file is unpickled or executed (DESIGN, I8)."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODULES = sorted(path for name in ("swarm", "peer", "web") for path in (ROOT / name).rglob("*.py"))
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "torch.load", "np.load", "numpy.load"}


def uses(tree: ast.AST) -> set[str]:
    """Modules that are imported and names that are called."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").split(".")[0])
        elif isinstance(node, ast.Call):
            found.add(ast.unparse(node.func))
    return found


def test_nothing_is_unpickled_or_executed() -> None:
    forbidden = FORBIDDEN_MODULES | FORBIDDEN_CALLS
    found = {path: uses(ast.parse(path.read_text())) & forbidden for path in MODULES}
    assert len(found) > 100
    assert not {str(path.relative_to(ROOT)): names for path, names in found.items() if names}


def test_what_is_forbidden_is_found() -> None:
    found = uses(ast.parse("import pickle\nfrom marshal import loads\ntorch.load(x)\neval('1')"))
    assert found == {"pickle", "marshal", "torch.load", "eval"}
