"""What the documents say can be checked is checked: links, paths, commands, arrows, examples."""

from __future__ import annotations

import ast
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from peer.baseline import Baseline
from peer.cli.peer_program import peer_app
from peer.cli.swarm_program import app
from peer.launch import plan_of, whole_model
from swarm.config import parse_toml
from swarm.data import build_dataset
from swarm.wire.frames import PROTOCOL_VERSION

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
)
FOLDERS = ("swarm/", "peer/", "web/", "tests/", "docs/", "examples/", "benchmarks/")
BLOCK = re.compile(r"^(<!-- test -->\n)?```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(path: Path, language: str, marked: bool = False) -> list[str]:
    """Fenced blocks of a language; `marked`: those preceded by `<!-- test -->` only."""
    found = BLOCK.findall(path.read_text())
    return [text for mark, name, text in found if name == language and (mark or not marked)]


def anchors(path: Path) -> set[str]:
    """The names under which headings are linked to."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each).strip().lower().replace(" ", "-") for each in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        there = path.parent / name if name else path
        assert there.exists(), f"{path.name} links to {target}"
        assert not anchor or anchor in anchors(there), f"{path.name} links to {target}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_are_named_exist(path: Path) -> None:
    text = path.read_text()
    for name in re.findall(
        r"`((?:swarm|peer|web|tests|docs|examples|benchmarks|\.ci)/[\w./-]*)`", text
    ):
        if not name.startswith("benchmarks/out"):  # made by `make bench`
            assert (ROOT / name).exists(), f"{path.name} names {name}"
    for name in re.findall(r"(?:pytest|python) ((?:tests|benchmarks)/[\w./-]+)", text):
        assert (ROOT / name).exists(), f"{path.name} names {name}"


def commands(path: Path) -> Iterator[list[str]]:
    """Our own commands, in blocks and within lines, as words."""
    text = path.read_text()
    lines = [line.strip().removeprefix("$ ") for line in text.splitlines()]
    for line in [*lines, *re.findall(r"`([^`\n]+)`", text)]:
        if re.match(r"swarm(-peer)? (--|[a-z]+( |$))", line):
            try:
                yield shlex.split(line, comments=True)
            except ValueError:  # an apostrophe: prose
                continue


def test_commands_have_the_flags_that_are_shown() -> None:
    helps: dict[str, str] = {}
    seen = 0
    for path in DOCUMENTS:
        for name, *words in commands(path):
            command = "" if name == "swarm-peer" else words[0]
            flags = [word.partition("=")[0] for word in words if word.startswith("--")]
            if command not in helps:
                result = CliRunner().invoke(
                    app if command else peer_app,
                    [*([command] if command else []), "--help"],
                    env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"},
                )
                assert result.exit_code == 0, f"{path.name}: {name} {words}"
                helps[command] = result.output
            for flag in flags:
                assert re.search(rf"{flag}(?![\w-])", helps[command]), f"{path.name}: {words}"
                seen += 1
    assert seen > 15


def test_commands_of_the_readme_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = "".join(blocks(ROOT / "README.md", "console", marked=True)).splitlines()
    assert lines
    for line in lines:
        name, *words = shlex.split(line.removeprefix("$ "), comments=True)
        assert name == "swarm"
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output
    assert parse_toml((tmp_path / "run.toml").read_text()).model.stages == 3


def test_the_custom_stage_of_the_readme_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn.datasets", reason="pip install scikit-learn")
    (text,) = blocks(ROOT / "README.md", "python", marked=True)
    module = ModuleType("my_package")
    exec(compile(text, "README.md", "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, "my_package", module)
    config = parse_toml(
        """
        [model]
        pipeline = "my_package:pipeline"
        stages = 3
        [data]
        source = "pipeline"
        [batch]
        microbatches = 4
        [schedule]
        steps = 8
        """
    )
    dataset = build_dataset(config)
    baseline = Baseline(plan_of(config), whole_model(config), dataset, config.optimizer)
    losses = [result.loss for result in baseline.steps(config.schedule.steps)]
    assert losses[-1] < 0.95 * losses[0]


def test_the_library_never_imports_the_processes() -> None:
    """docs/architecture.md: imports point one way."""
    for path in (ROOT / "swarm").rglob("*.py"):
        assert not imports(path) & {"peer", "web"}, path
    for path in (ROOT / "web").rglob("*.py"):
        assert "peer" not in imports(path), path
    for path in (ROOT / "peer").rglob("*.py"):
        assert "web" not in imports(path) or path.name == "web_entry.py", path


def imports(path: Path) -> set[str]:
    """The packages a module imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
        elif isinstance(node, ast.Import):
            found.update(alias.name.partition(".")[0] for alias in node.names)
    return found


def test_every_method_stands_in_the_protocol() -> None:
    text = (ROOT / "docs" / "protocol.md").read_text()
    for path in (ROOT / "peer").glob("*.py"):
        for name in re.findall(r'"(\w+)": Method\(', path.read_text()):
            assert f"| `{name}` |" in text, f"{path.name} answers {name}"
    assert f"now **{PROTOCOL_VERSION}**" in text


def test_the_picture_needs_nothing_from_elsewhere() -> None:
    svg = (ROOT / "docs" / "images" / "terminal.svg").read_text()
    assert "stage&#160;0" in svg
    assert not re.findall(r"(?:href|url|src)\W+http", svg)
