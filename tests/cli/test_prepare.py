from __future__ import annotations

import json

import pytest

from river_offload.cli.app import app


def test_prepare_loads_says_what_was_built_and_closes(stub, runner, monkeypatch, tmp_path):
    monkeypatch.setenv("RIVER_OFFLOAD_CACHE", str(tmp_path))
    done = runner.invoke(app, ["prepare", "demo", "--bits", "3", "--json"])
    assert done.exit_code == 0, done.output
    assert done.stderr == (
        f"demo: 29 of 30 layers have their river at 3 bits, group 64, in {tmp_path} · 1.5 s · "
        "needs 100.0 MiB of 200.0 MiB\n"
    )
    answer = json.loads(done.stdout)
    assert (answer["river_layers"], answer["bits"], answer["seconds"]) == (list(range(1, 30)), 3, {"load": 1.5})
    assert stub.model.closed == 1


@pytest.mark.parametrize("options", [["--mode", "backbone"], ["--tau", "0.9"], ["--prompt", "a"], ["--seed", "1"]])
def test_options_without_effect_are_refused(stub, runner, options):
    done = runner.invoke(app, ["prepare", "demo", *options])
    assert (done.exit_code, stub.loads) == (2, [])
    assert options[0].lstrip("-") in done.stderr
