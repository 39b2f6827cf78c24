"""`river-mem sweep` and `river-mem compare` as commands."""

from __future__ import annotations

import json
import os

import pytest
from families import _COMMON as TINY
from transformers import LlamaConfig

from river_offload.cli.mem_app import app

SMALL = ("--contexts", "64", "--methods", "river", "--group-size", "32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    config = LlamaConfig(**TINY, num_hidden_layers=3)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    return str(folder)


def test_json_table_and_all_three_files(runner, folder, tmp_path):
    files = [tmp_path / name for name in ("a.csv", "a.png", "a.html")]
    wanted = [part for option, file in zip(("--csv", "--plot", "--html"), files, strict=True)
              for part in (option, str(file))]  # fmt: skip
    arguments = ["sweep", folder, "--contexts", "64,128", "--methods", "river,quantized", "--group-size", "32"]
    done = runner.invoke(app, [*arguments, "--json", "--budget", "1MiB", *wanted])
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    assert [(row["method"], row["context"]) for row in answer["rows"]] == [
        ("river", 64), ("river", 128), ("quantized", 64), ("quantized", 128),
    ]  # fmt: skip
    assert answer["budget_bytes"] == 2**20
    assert sorted(os.listdir(tmp_path)) == ["a.csv", "a.html", "a.png"]
    assert files[1].read_bytes().startswith(b"\x89PNG")
    assert "</html>" in files[2].read_text(encoding="utf-8")


def test_table_for_people(runner, folder):
    done = runner.invoke(app, ["sweep", folder, *SMALL, "--budget", "1GiB"])
    assert done.exit_code == 0, done.output
    heading, first, *_ = done.stdout.splitlines()
    assert heading.split() == ["method", "context", "peak", "paper's", "way", "published", "in", "1.00", "GiB"]
    assert first.split()[:2] == ["river", "64"] and first.split()[-1] == "yes"
    assert "0 resident layers, 1 streaming buffer" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--contexts", "16x"), "'16x' is no number of tokens"),
        (("--contexts", "0"), "context is 0"),
        (("--contexts", "64,,128"), "'' is no number of tokens"),
        (("--methods", "rivr"), "did you mean river?"),
        (("--budget", "8G"), "ambiguous"),
        (("--head-bits", "5"), "--head-bits is 5"),
        (("--device", "tpu"), "plans for cuda or cpu"),
        (("--plot", "a.gif"), "use .png, .svg or .pdf"),
        (("--html", "absent/a.html"), "--html absent/a.html cannot be written: No such file"),
        (("--csv", "a", "--html", "a"), "name one file twice"),
    ],
)
def test_options_that_cannot_be_used(runner, folder, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    done = runner.invoke(app, ["sweep", folder, *SMALL, *arguments])
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    assert message in done.stderr
    assert os.listdir(tmp_path) == []


def test_a_longer_context_than_the_model_attends_to(runner, folder):
    done = runner.invoke(app, ["sweep", folder, "--contexts", "1k"])
    assert done.exit_code == 2
    assert "context 1024 is more than the 256 tokens" in done.stderr


def test_no_such_model(runner, tmp_path):
    done = runner.invoke(app, ["sweep", str(tmp_path / "absent")])
    assert (done.exit_code, done.stdout) == (4, "")


def test_compare_two_plans(runner, tmp_path):
    for name, kv in (("a.json", 2**20), ("b.json", 3 * 2**20)):
        plan = {
            "schema": 1,
            "kind": "plan",
            "context": kv,
            "peak_device_bytes": kv,
            "categories": {"kv": kv, "mask": 0},
        }
        (tmp_path / name).write_text(json.dumps(plan))
    a, b = str(tmp_path / "a.json"), str(tmp_path / "b.json")
    done = runner.invoke(app, ["compare", a, b])
    assert done.exit_code == 0, done.output
    kv, peak = done.stdout.splitlines()[-2:]
    assert kv.split() == ["kv", "1.0", "MiB", "3.0", "MiB", "+2.0", "MiB", "+200.0%"]
    assert peak.split()[0] == "peak" and "mask" not in done.stdout
    assert "context is 1048576 in A and 3145728 in B" in done.stderr
    done = runner.invoke(app, ["compare", a, a, "--json"])
    assert json.loads(done.stdout)["peak_device_bytes"]["difference_bytes"] == 0
    done = runner.invoke(app, ["compare", a, str(tmp_path / "absent")])
    assert (done.exit_code, done.stdout) == (2, "")
