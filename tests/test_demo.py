"""The real model, through the command that the README shows (acceptance of the first issue, line 5)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.demo, pytest.mark.slow]

BUDGET_BYTES = 200 * 1024**2
ARGUMENTS = ["demo", "--budget", "200MiB", "--context", "1024"]
DRAFTS = ["--draft", "16"]
"""A length that no clock decides: how many tokens a check looks at shows in the last bit of its logits."""
PROMPT = ["--prompt", "Explain why the sky is blue.", "--max-new-tokens", "64", "--json"]

GROWTH = """
import sys, threading, time
import river_offload.loading
from transformers import AutoTokenizer
from river_offload.memory.probes import anonymous_bytes

class Peak(threading.Thread):
    bytes, done = 0, False
    def run(self):
        while not self.done:
            self.bytes = max(self.bytes, anonymous_bytes())
            time.sleep(0.002)

import torch
torch.randn(64, 64) @ torch.randn(64, 64)  # what the first product of a process allocates
AutoTokenizer.from_pretrained(sys.argv[1])  # a vocabulary in RAM is no device memory; so is what importing takes
before_bytes = anonymous_bytes()
peak = Peak()
peak.start()
model = river_offload.load("demo", budget="200MiB", context=1024, tau=0.95)
ids = torch.arange(5, 905).unsqueeze(0)
model.generate(ids, max_new_tokens=32, do_sample=False)
peak.done = True
peak.join()
print(peak.bytes - before_bytes, model.river.report()["peak_device_bytes"])
"""


def run(*command: str) -> str:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def first_run(river_cache: Path) -> dict[str, Any]:
    return dict(json.loads(run("-m", "river_offload.cli", "generate", *ARGUMENTS, *DRAFTS, *PROMPT)))


def test_it_writes_text_within_a_budget_smaller_than_itself(first_run: dict[str, Any]) -> None:
    assert (first_run["mode"], first_run["new_tokens"], first_run["num_layers"]) == ("lossless", 64, 30)
    assert "sky" in first_run["text"].lower()
    assert first_run["peak_device_bytes"] <= first_run["budget_bytes"] == BUDGET_BYTES
    assert first_run["bytes_streamed"] > 0
    assert first_run["placement"]["streamed_layers"] > 0
    # Nearly everything that is streamed is streamed for a check, and a check gives several tokens.
    assert first_run["tokens_per_backbone_pass"] > 1 and first_run["checked_share"] == 1


def test_mode_exit_leaves_the_backbone(first_run: dict[str, Any]) -> None:
    early = json.loads(run("-m", "river_offload.cli", "generate", *ARGUMENTS, "--tau", "0.95", *PROMPT))
    assert (early["mode"], early["tau"]) == ("exit", 0.95)
    assert early["new_tokens"] == len(early["depths"]) == 64
    assert "sky" in early["text"].lower()
    assert early["peak_device_bytes"] <= early["budget_bytes"] == BUDGET_BYTES
    assert early["bytes_streamed"] > 0
    assert early["placement"]["streamed_layers"] > 0
    assert 1 <= early["mean_depth"] < early["num_layers"] == 30


def test_a_second_start_builds_nothing_and_says_the_same(first_run: dict[str, Any], river_cache: Path) -> None:
    built = {path: path.stat().st_mtime_ns for path in river_cache.rglob("*") if path.is_file()}
    assert any("river" in path.parts for path in built)
    again = json.loads(run("-m", "river_offload.cli", "generate", *ARGUMENTS, *DRAFTS, *PROMPT))
    assert again["text"] == first_run["text"]
    assert {path: path.stat().st_mtime_ns for path in river_cache.rglob("*") if path.is_file()} == built


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="RssAnon is Linux's")
def test_anonymous_memory_grows_by_what_is_reported(first_run: dict[str, Any], river_cache: Path) -> None:
    assert os.environ["RIVER_OFFLOAD_CACHE"] == str(river_cache)
    unpacked = next(path.parent for path in river_cache.glob("gguf/*/config.json"))  # another test has another dtype
    grown_bytes, reported_bytes = map(int, run("-c", GROWTH, str(unpacked)).split())
    assert reported_bytes <= BUDGET_BYTES
    assert abs(grown_bytes - reported_bytes) <= 0.15 * reported_bytes, (grown_bytes, reported_bytes)
