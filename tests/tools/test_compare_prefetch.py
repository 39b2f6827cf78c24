"""The tool that sets the kinds of prefetch side by side, on a tiny model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from families import budget_for

from policies.prefetch import KINDS


def test_every_kind_runs_the_same_depths_in_every_round(
    tool: ModuleType, checkpoint: Callable[..., Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = checkpoint("llama")
    arguments = [str(path), "--budget", str(budget_for(path, 1, slots=2, context=64)), "--context", "64"]
    arguments += ["--slots", "2", "--tokens", "6", "--rounds", "2", "--depths", "geometric:2,full=0.3"]
    assert tool.main([*arguments, "--cache-dir", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == list(KINDS)
    for figures in found.values():
        assert figures["tokens"] == 12 and figures["moved_bytes"] > 0 and len(figures["stalls_of_rounds_s"]) == 2
    assert found["none"]["wasted_bytes"] == 0 and found["oracle"]["wasted_bytes"] == 0
    # Without reading ahead every layer that is not there is a miss. Whether an oracle comes late is the disk's affair.
    assert found["none"]["misses"] > 0 and found["none"]["misses"] >= found["oracle"]["misses"]


def test_recovered_is_the_share_of_the_stall_between_none_and_oracle(tool: ModuleType) -> None:
    def run(stall_s: float, wasted: float = 0) -> dict[str, float]:
        return {"tokens": 4, "seconds": 2, "stall_s": stall_s, "misses": 1, "moved_bytes": 50, "wasted_bytes": wasted,
                "copy_s": 1.0}  # fmt: skip

    stalls: dict[str, Any] = {"none": 10.0, "next": 6.0, "predicted": 5.0, "oracle": 2.0}
    found = tool._summed({kind: [run(stall_s, 5.0), run(stall_s)] for kind, stall_s in stalls.items()})
    assert [found[kind]["recovered"] for kind in KINDS] == [0.0, 0.5, 0.625, 1.0]
    assert found["next"]["wasted_share"] == 0.05 and found["next"]["tokens_per_s"] == 2.0
    assert len(tool._table(found)) == 5


def test_errors_are_told_with_their_exit_code(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["absent", "--budget", "1GiB"]) == 4
    assert "absent" in capsys.readouterr().err
    for more, words in (
        (["--rounds", "0"], "rounds is 0"),
        (["--tokens", "0"], "tokens is 0"),
        (["--link-limit", "0"], "link_limit is 0"),
    ):
        assert tool.main(["absent", "--budget", "1GiB", *more]) == 2
        assert words in capsys.readouterr().err


def test_a_model_that_streams_nothing_cannot_be_compared(
    tool: ModuleType, checkpoint: Callable[..., Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert tool.main([str(checkpoint("llama")), "--budget", "1GiB", "--cache-dir", str(tmp_path)]) == 2
    assert "nothing to fetch ahead" in capsys.readouterr().err
