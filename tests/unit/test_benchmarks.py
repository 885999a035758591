"""The contract of benchmarks: the last line of each is one JSON object; `make bench` keeps it."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import all_reduce
from benchmarks._helpers import print_results, result

ROOT = Path(__file__).parents[2]
BENCHMARKS = sorted((ROOT / "benchmarks").glob("[!_]*.py"))
LAB = [
    path
    for path in sorted((ROOT / "benchmarks" / "wan").glob("[!_]*.py"))
    if path.name != "everything.py"  # runs the others
]
KEYS = {"metric", "value", "unit", "goal", "met"}


def test_a_result_says_whether_its_goal_is_met(capsys: pytest.CaptureFixture[str]) -> None:
    results = [
        result("speed", 2.00004, "x", 2.0),
        result("speed", 1.99996, "x", 2.0),  # shown as 2.0, and missed
        result("memory", 80, "MiB", 80, at_most=True),
        result("memory", 81, "MiB", 80, at_most=True),
        result("start", 1.23456, "s"),
    ]
    assert [(each["value"], each["goal"], each["met"]) for each in results] == [
        (2.0, ">= 2.0", True),
        (2.0, ">= 2.0", False),
        (80, "<= 80", True),
        (81, "<= 80", False),
        (1.2346, None, None),
    ]
    assert all(each.keys() == KEYS for each in results)
    print("a table")
    print_results("peers", results)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert json.loads(lines[-1]) == {"bench": "peers", "results": results}


def named_by(node: ast.AST) -> str | None:
    """The benchmark whose results this statement prints, in either of the ways there are."""
    text = ast.unparse(node) if isinstance(node, ast.Expr) else ""
    either = (
        r"print_results\('(\w+)', .*\)|print\(json\.dumps\({'bench': '(\w+)', 'results': \w+}\)\)"
    )
    found = re.fullmatch(either, text)
    return found and (found[1] or found[2])


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_a_benchmark_ends_with_its_results_under_its_own_name(path: Path) -> None:
    """`make bench` takes the last line for the results, and drops those of a benchmark that prints
    anything after them. In the source, since running them takes an hour."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    (main,) = (each for each in tree.body if getattr(each, "name", "") == "main")
    assert isinstance(main, ast.FunctionDef)
    assert ast.unparse(tree.body[-1]) == "if __name__ == '__main__':\n    main()"
    assert named_by(main.body[-1]) == path.stem
    assert {named_by(each) for each in ast.walk(tree)} == {path.stem, None}
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict) and "metric" in (keys := list(map(literal, node.keys))):
            assert set(keys) == KEYS, f"line {node.lineno}"


@pytest.mark.parametrize("path", LAB, ids=lambda path: path.stem)
def test_a_measurement_of_the_lab_ends_with_its_results_too(path: Path) -> None:
    """What the lab gave may stand beside them."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    (main,) = (each for each in tree.body if getattr(each, "name", "") == "main")
    assert isinstance(main, ast.FunctionDef)
    bench = named_by(main.body[-1])
    assert bench is not None
    assert bench.startswith("wan_")
    assert {named_by(each) for each in ast.walk(tree)} == {bench, None}
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict) and "metric" in (keys := list(map(literal, node.keys))):
            assert set(keys) >= KEYS, f"line {node.lineno}"


def literal(key: ast.expr | None) -> object:
    return key.value if isinstance(key, ast.Constant) else None


def test_make_bench_keeps_each_result_and_goes_on_after_one_that_fails(tmp_path: Path) -> None:
    """In a folder of its own, with stubs. What one that fails gave earlier goes too: it would pass
    for a result of today."""
    folder, out = tmp_path / "benchmarks", tmp_path / "benchmarks" / "out"
    out.mkdir(parents=True)
    line = {"bench": "c_fine", "results": [result("speed", 1.0, "x", 2.0)]}
    stubs = {
        "a_broken": "import sys; print('a table'); sys.exit('no such device')",
        "b_talks_on": 'print(\'{"bench": "b_talks_on"}\'); print("done")',
        "c_fine": f"print('its table'); print({json.dumps(line)!r})",
        "_part": "raise SystemExit('no benchmark')",
    }
    for name, code in stubs.items():
        (folder / f"{name}.py").write_text(code + "\n")
        (out / f"{name}.json").write_text("of an earlier run\n")
    (out / "_part.json").unlink()
    installed = (f"BIN={Path(sys.executable).parent}", "-o", ".venv/.stamp-test")
    done = subprocess.run(
        ["make", "--file", str(ROOT / "Makefile"), *installed, "bench"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert [each for each in said if each.startswith("==")] == [
        "== a_broken", "== b_talks_on", "== c_fine"
    ]  # fmt: skip
    assert "   a_broken failed: no such device" in said
    assert "its table" in said
    assert [path.name for path in out.glob("*.json")] == ["c_fine.json"]
    assert json.loads((out / "c_fine.json").read_text()) == line


def test_members_of_hivemind_that_find_no_group_are_begun_again_and_then_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other sides, measured for minutes by then, are not lost with it."""
    script: list[float | BaseException] = []
    open_now: list[object] = []

    class Members:
        def __init__(self, kind: str, num: int) -> None:
            open_now.append(self)

        def tell(self, **fields: object) -> None: ...

        def tell_one(self, rank: int, **fields: object) -> None: ...

        def hear(self) -> None: ...

        def hear_one(self, rank: int) -> dict[str, list[str]]:
            return {"addresses": []}

        def round(self, **fields: object) -> float:
            given = script.pop(0)
            if isinstance(given, BaseException):
                raise given
            return given

        def close(self) -> None:
            open_now.remove(self)

    monkeypatch.setattr(all_reduce, "Members", Members)
    no_group = all_reduce.MemberEndedError("member 2 ended:\nno group\n")
    side = all_reduce.Hivemind(4, [1000])
    script += [no_group, 1.5, 1.25, BrokenPipeError("told too late"), no_group]
    assert [side.round(1000) for _ in range(4)] == [1.5, 1.25, None, None]
    assert script == open_now == []
    said = capsys.readouterr().err
    assert said.count("hivemind, 4 members: member 2 ended:\nno group\n") == 2
    side.close()
