from __future__ import annotations

import csv
import subprocess
import sys

import pytest
from sweeps import a_sweep

from river_offload.errors import UsageError
from river_offload.planning.sweep_plot import draw, plot_kind, write_csv


@pytest.mark.parametrize(("ending", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_the_picture_is_drawn(ending, start, tmp_path):
    file = tmp_path / f"a.{ending}"
    draw(a_sweep(), file, plot_kind(file))
    assert file.read_bytes().startswith(start)


def test_lines_points_and_the_budget_are_in_the_picture(tmp_path):
    file = tmp_path / "a.svg"
    draw(a_sweep(budget_bytes=None), file, "svg")
    without = file.read_text()
    draw(a_sweep(), file, "svg")
    with_budget = file.read_text()
    for name in ("backbone", "river", "river@3", "balcony"):
        assert f"<!-- {name} " in with_budget  # matplotlib writes text as outlines, and beside them as comments
    assert "<!-- budget 6.00 -->" in with_budget and "budget" not in without
    assert "published" in with_budget


def test_other_kinds_are_refused(tmp_path):
    for name in ("a.txt", "a"):
        with pytest.raises(UsageError, match=r"use \.png, \.svg or \.pdf"):
            plot_kind(tmp_path / name)


def test_csv_has_every_row_and_category(tmp_path):
    swept, file = a_sweep(), tmp_path / "a.csv"
    write_csv(swept, file)
    with file.open(newline="") as stream:
        lines = list(csv.DictReader(stream))
    assert len(lines) == len(swept.rows)
    for line, row in zip(lines, swept.rows, strict=True):
        assert (line["method"], int(line["context"])) == (row.method, row.context)
        assert int(line["peak_device_bytes"]) == row.peak_device_bytes
        assert line["published_bytes"] == ("" if row.published_bytes is None else str(row.published_bytes))
        assert {name: int(line[f"{name}_bytes"]) for name in row.categories} == row.categories
        assert line["note"] == row.note


def test_importing_brings_no_matplotlib():
    program = "import sys, river_offload.planning.sweep_plot; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
