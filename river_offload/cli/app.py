"""`river-offload`: the commands and nothing else. What a command does is in the module of its name."""

from __future__ import annotations

import sys

try:
    from river_offload.cli.bench import bench
    from river_offload.cli.chat import chat
    from river_offload.cli.generate import generate
    from river_offload.cli.prepare import prepare
    from river_offload.cli.program import program, run
    from river_offload.cli.trace import trace
except KeyboardInterrupt:
    # The installed script imports this module before it can guard anything: Ctrl-C in its first tenth of a second.
    sys.exit(130)

app = program(
    "river-offload",
    (generate, chat, prepare, bench, trace),
    help="Run decoder-only transformers models under a memory budget: a 4-bit exit river rests on the device, "
    "full-precision layers are streamed only for the tokens that need them.",
    epilog="MODEL is a directory of safetensors, a .gguf file, a hub id (org/name) or demo.\n\n"
    "Built rivers and unpacked GGUF files are kept in --cache-dir, else in the folder that the environment variable "
    "RIVER_OFFLOAD_CACHE names, else in ~/.cache/river-offload.",
)


def main() -> None:
    """Entry point of the installed script (see `program.run`)."""
    run(app)
