from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from river_offload.errors import UsageError
from river_offload.eval.trace_plot import plot_trace, signal_map, trace_summary
from river_offload.trace import PassageRecord, Trace

LAYERS = 6
PNG = b"\x89PNG\r\n"


def record(index: int, depth: int, signals: list[float], nbytes: int = 1000) -> PassageRecord:
    prefill = index == 0
    return PassageRecord(
        index=index, new_tokens=7 if prefill else 1, batch=1, cached_tokens=0 if prefill else 6 + index,
        path="prefill" if prefill else "decode", mode="exit", depth=depth, signals=signals, wait_s=0.1,
        bytes_streamed=nbytes, seconds=0.5,
    )  # fmt: skip


def a_trace() -> Trace:
    records = [record(0, LAYERS, [0.1, 0.2, 0.3, 0.4]), record(1, 3, [0.4, 0.6]), record(2, 2, [0.7])]
    return Trace(LAYERS, {"model": "m", "tau": 0.5, "min_exit": 2}, records)


def test_summary_counts_prompts_and_tokens_apart() -> None:
    figures = trace_summary(a_trace())
    assert figures["passages"] == 3
    assert figures["prefill"]["tokens"] == 7 and figures["prefill"]["passages"] == 1
    decode = figures["decode"]
    assert (decode["tokens"], decode["seconds"], decode["bytes_streamed"]) == (2, 1.0, 2000)
    assert decode["stall_s"] == pytest.approx(0.2)
    assert decode["depths"]["mean"] == 2.5
    assert figures["drafting"] is None
    assert trace_summary(Trace(LAYERS))["decode"]["tokens"] == 0


def test_signals_stand_at_the_layers_they_were_measured_after() -> None:
    table = signal_map(a_trace().records, LAYERS)
    # The prompt never left: its signals are those after layers 2 to 5, the last layer having none.
    assert [row[0] for row in table[2:6]] == [0.1, 0.2, 0.3, 0.4]
    assert (table[2][1], table[3][1], table[2][2]) == (0.4, 0.6, 0.7)
    assert all(math.isnan(value) for value in (*table[1], table[6][0], table[4][1]))


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_the_picture_is_there_and_nothing_else(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"out.{ending}"
    plot_trace(a_trace(), path)
    assert os.listdir(tmp_path) == [path.name]
    assert path.stat().st_size > 5000
    if ending == "png":
        assert path.read_bytes().startswith(PNG)


def test_traces_of_every_sort_are_drawn(tmp_path: Path) -> None:
    forced = Trace(LAYERS, {}, [record(index, 2, [math.nan], nbytes=0) for index in range(80)])
    only_prompt = Trace(LAYERS, {"tau": 0.5}, [record(0, LAYERS, [])])
    for number, trace in enumerate((forced, only_prompt)):
        plot_trace(trace, tmp_path / f"{number}.png", title="t")
        assert (tmp_path / f"{number}.png").read_bytes().startswith(PNG)


def test_what_cannot_be_drawn_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no passages"):
        plot_trace(Trace(LAYERS), tmp_path / "a.png")
    for name in ("a.txt", "a"):
        with pytest.raises(UsageError, match=r"use \.png, \.svg or \.pdf"):
            plot_trace(a_trace(), tmp_path / name)
    with pytest.raises(UsageError, match=r"a\.png cannot be written: No such file"):
        plot_trace(a_trace(), tmp_path / "absent" / "a.png")
    assert os.listdir(tmp_path) == []


def test_drawing_opens_no_window_and_importing_brings_no_matplotlib() -> None:
    program = (
        "import sys; import river_offload.eval.trace_plot\n"
        "print(sorted({'matplotlib', 'torch', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
