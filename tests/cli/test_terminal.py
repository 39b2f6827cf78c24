from __future__ import annotations

import pytest

from river_offload.cli.terminal import in_option_names


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("Free some space or choose another folder with cache_dir.", "choose another folder with --cache-dir."),
        ("head_bits=8 is not possible; use head_bits=16", "--head-bits 8 is not possible; use --head-bits 16"),
        ("min_exit is 40, the model has 30 layers", "--min-exit is 40"),
        ("quant.bits is 5: expected 2", "--bits is 5"),
        ("quant.group_size is 48", "--group-size is 48"),
        ("use device='cpu'", "use --device cpu"),
        ("pass `trust_remote_code=True`, please", "pass `--trust-remote-code`, please"),
    ],
)
def test_arguments_are_named_as_options_are(message, shown):
    assert shown in in_option_names(message)


@pytest.mark.parametrize(
    "message",
    [
        "/home/me/cache_dir: no config.json",
        "cache_dir/river/5a: found 1 B free",
        "cache_dir: no config.json",
        "model.min_exit.weight is missing",
        "my_cache_dir and cache_dirs",
        "8 bits, a group_size, an unknown key quant.bitz",
    ],
)
def test_paths_and_names_are_left_alone(message):
    assert in_option_names(message) == message
