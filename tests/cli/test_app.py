from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from river_offload._version import __version__
from river_offload.cli.app import app

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
