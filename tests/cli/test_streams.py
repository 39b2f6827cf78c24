"""Standard streams that are closed or full: one clear line, or nothing, and never a traceback."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CLI = f"{sys.executable} -m river_offload.cli"
FULL = "error: standard output cannot be written: No space left on device\n"
CLOSED = "error: standard output cannot be written: it is closed\n"


def shell(line: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", line], capture_output=True, text=True, check=False, timeout=60, env={**os.environ, **env}
    )


@pytest.mark.parametrize(
    "command", ["--version", "--help", "generate --help", "generate x --prompt a", "generate x --prompt a --json",
                "chat x", "prepare x --json"],
)  # fmt: skip
@pytest.mark.parametrize(("where", "message"), [(">/dev/full", FULL), (">&-", CLOSED)])
def test_standard_output_that_takes_nothing_is_told_before_loading(command, where, message):
    done = shell(f"{CLI} {command} {where}")
    assert (done.returncode, done.stderr) == (1, message)  # a model that does not exist is not even looked for


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("generate x --prompt-file -", "error: --prompt-file - cannot be read: it is closed\n"),
        ("chat x", "error: standard input cannot be read: it is closed\n"),
    ],
)
def test_standard_input_that_is_closed(command, message):
    done = shell(f"{CLI} {command} <&-")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message)


@pytest.mark.parametrize("where", ["2>&-", "2>/dev/full"])
def test_standard_error_that_takes_nothing_changes_nothing(where):
    assert shell(f"{CLI} generate x {where}").returncode == 2
    assert shell(f"{CLI} --version {where}").stdout.startswith("river-offload ")


def program(body: str) -> str:
    """A command whose text fails halfway, after loading."""
    return (
        "import sys, typer\n"
        "from river_offload.cli.streams import guard_standard_streams\n"
        "from river_offload.cli.terminal import Terminal, boundary\n"
        "from river_offload.cli.report import print_json\n"
        "from river_offload.cli.turn import ToStdout\n"
        "guard_standard_streams()\n"
        "app = typer.Typer(pretty_exceptions_enable=False)\n"
        "@app.command()\n"
        "def run():\n"
        "    with boundary(Terminal(quiet=False)):\n"
        f"        {body}\n"
        "app()\n"
    )


@pytest.mark.parametrize(
    "body", ["with ToStdout() as out: out('text')", "print_json({'text': 'a'})", "print('a' * 99999)"]
)
def test_a_disk_that_fills_up_while_text_is_written(body):
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", program(body)], stdout=full, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr.decode()) == (1, FULL)


def test_a_closed_stream_never_becomes_another_file(tmp_path):
    # Without a guard the next file opened is number 1 or 2, and what is printed lands in it.
    source = (
        "import os\nfrom river_offload.cli.streams import guard_standard_streams\nguard_standard_streams()\n"
        f"file = open({str(tmp_path / 'file')!r}, 'w')\nassert file.fileno() > 2, file.fileno()\n"
    )
    assert shell(f'{sys.executable} -c "$SOURCE" <&- >&- 2>&-', SOURCE=source).returncode == 0


def test_bytes_that_are_not_text_are_read_and_those_that_cannot_be_shown_written(tmp_path):
    source = (
        "import sys\nfrom river_offload.cli.streams import guard_standard_streams\nguard_standard_streams()\n"
        "sys.stdout.write(ascii(sys.stdin.readline()) + sys.stdin.readline() + chr(0xdcff))"
    )
    done = shell(
        f"printf 'h\\377\\nÜ' | {sys.executable} -c \"$SOURCE\"", SOURCE=source, PYTHONIOENCODING="utf-8:strict"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "'h\\udcff\\n'Ü?", "")


def test_a_stream_that_is_full_for_now_is_waited_for():
    source = (
        "import os, sys\nos.set_blocking(1, False)\n"
        "from river_offload.cli.streams import guard_standard_streams\nguard_standard_streams()\n"
        "sys.stdout.write('x' * 1000000)\nsys.stdout.flush()\n"
    )
    done = shell(f'{sys.executable} -c "$SOURCE" | (sleep 0.3; wc -c)', SOURCE=source)
    assert (done.stdout.strip(), done.stderr) == ("1000000", "")
