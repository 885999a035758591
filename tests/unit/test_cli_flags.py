"""The commands and their flags, frozen: whoever adds, renames or removes one says so here.

What changes the numbers of a run belongs into run.toml, not into a flag.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import pytest
import typer
from typer.testing import CliRunner

from peer.cli.peer_program import peer_app
from peer.cli.swarm_program import app

FLAGS = {
    "init": "PATH --debug",
    "id": "--debug",
    "train": "RUN.toml --accept-loss --announce --debug --dir --identity --join --lan --listen "
    "--plain --report --resume --second-stages --steps",
    "up": "RUN.toml --debug --device --dir --peers --plain --report --resume "
    "--second-stages --steps --threads --web",
    "demo": "--debug --dir --minutes --plain",
    "chaos": "RUN.toml --debug --dir --every --minutes --peers --seed",
    "baseline": "RUN.toml --debug --device --report --resume --steps --threads",
    "status": "WHERE --debug --json",
    "dashboard": "--data-dir --debug --hide-join --host --join --port",
    "report": "RUN_DIR --debug --out",
    "checkpoint": "RUN_DIR --debug",
    "export": "RUN_DIR OUT --debug",
    "generate": "DIR TEXT --debug --seed --temperature --tokens",
    "plan": "RUN.toml --debug --json --machines",
    "simulate": "SCENARIO.toml --debug --out --seeds",
    "eval": "DIR --debug --json --microbatches --run",
}
PEER_FLAGS = (
    "--allow-pipeline --announce --connections --data-dir --debug --device --drain-s --identity "
    "--join --lan --listen --memory --name --pretrained --stage --threads --version"
)


def flags_of(command: object) -> str:
    """Arguments in order, then every spelling of every flag."""
    parameters = command.params  # type: ignore[attr-defined]
    arguments = [_name(each) for each in parameters]
    named = [each for each in arguments if not each.startswith("--")]
    return " ".join([*named, *sorted(each for each in arguments if each.startswith("--"))])


def _name(parameter: object) -> str:
    if parameter.param_type_name == "argument":  # type: ignore[attr-defined]
        return parameter.metavar or parameter.name.upper()  # type: ignore[attr-defined]
    return " ".join([*parameter.opts, *parameter.secondary_opts])  # type: ignore[attr-defined]


def test_the_flags_of_swarm() -> None:
    group = typer.main.get_command(app)
    commands = group.commands  # type: ignore[attr-defined]
    assert {name: flags_of(command) for name, command in commands.items()} == FLAGS


@pytest.mark.parametrize("program", [app, peer_app], ids=["swarm", "swarm-peer"])
def test_the_version(program: typer.Typer) -> None:
    result = CliRunner().invoke(program, ["--version"])
    assert result.exit_code == 0
    assert result.output == f"swarm-parallel {version('swarm-parallel')}\n"


def test_the_flags_of_swarm_peer() -> None:
    assert flags_of(typer.main.get_command(peer_app)) == PEER_FLAGS


@pytest.mark.parametrize("name", FLAGS)
def test_every_flag_is_explained(name: str) -> None:
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    assert command.help
    assert [each.name for each in command.params if not each.help] == []
    assert CliRunner().invoke(app, [name, "--help"]).exit_code == 0


def test_help_is_quick_because_it_imports_nothing_heavy() -> None:
    code = (
        "import sys; from typer.testing import CliRunner\n"
        "from peer.cli.peer_program import peer_app; from peer.cli.swarm_program import app\n"
        "for app in (app, peer_app):\n"
        "    assert CliRunner().invoke(app, ['--help']).exit_code == 0\n"
        "heavy = {'torch', 'hivemind', 'transformers', 'pydantic'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
