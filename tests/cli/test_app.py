from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from river_offload._version import __version__
from river_offload.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "transformers", "hqq", "numpy")


@pytest.mark.parametrize(
    "command", ["--help", "generate --help", "chat -h", "prepare -h", "bench -h", "trace -h", "--version"]
)
def test_help_answers_without_torch(command):
    program = (
        "import sys; from river_offload.cli.app import app\n"
        f"try: app({command.split()!r})\n"
        f"finally: print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == "[]\n"
    assert done.stdout


def test_a_usage_error_answers_without_torch():
    program = (
        "import sys; from river_offload.cli.app import app\n"
        "try: app(['generate', 'demo', '--prompt', '', '--budget', '1MiB'])\n"
        "finally: print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "False\n")


def test_version(runner):
    assert runner.invoke(app, ["--version"]).stdout == f"river-offload {__version__}\n"


def test_unknown_option_and_missing_model(runner):
    for arguments, message in ((["generate", "demo", "--taux", "1"], "--tau"), (["generate"], "MODEL")):
        done = runner.invoke(app, arguments)
        assert done.exit_code == 2
        assert message in done.stderr


@pytest.mark.parametrize("command", [[], ["generate"], ["chat"], ["prepare"]])
def test_help_names_what_an_option_takes_in_one_way(runner, command):
    text = runner.invoke(app, [*command, "--help"]).stdout
    assert not re.search(r"[{}]|<\w+>", text), text
    assert "--cache-dir" in text and "RIVER_OFFLOAD_CACHE" in text and "~/.cache/river-offload" in text
    assert "--help" in text
    if command:
        assert f"Usage: river-offload {command[0]} [OPTIONS] MODEL\n".split() == text.split("\n")[1].split()[:6]


def test_ctrl_c_while_the_program_is_imported_is_no_traceback(tmp_path: Path):
    (tmp_path / "typer.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nimport time\n")
    done = subprocess.run(
        [sys.executable, "-m", "river_offload.cli", "--version"],
        capture_output=True, text=True, check=False, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_gone_reader_is_not_an_error(tmp_path: Path):
    program = (
        "import sys\n"
        "from river_offload.cli.terminal import Terminal, boundary\n"
        "import typer\n"
        "app = typer.Typer(pretty_exceptions_enable=False)\n"
        "@app.command()\n"
        "def run():\n"
        "    with boundary(Terminal(quiet=False)):\n"
        "        while True: sys.stdout.write('x' * 9999); sys.stdout.flush()\n"
        "app()\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert writer.stdout and writer.stderr
    writer.stdout.read(10)
    writer.stdout.close()
    assert writer.stderr.read() == b""
    writer.stderr.close()
    assert writer.wait(timeout=60) == 141
