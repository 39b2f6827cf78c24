"""`river-mem`: the commands and nothing else. What a command does is in the module of its name."""

from __future__ import annotations

import sys

try:
    from river_offload.cli.mem_compare import compare
    from river_offload.cli.mem_doctor import doctor
    from river_offload.cli.mem_measure import measure
    from river_offload.cli.mem_plan import plan
    from river_offload.cli.mem_sweep import sweep
    from river_offload.cli.program import program, run
except KeyboardInterrupt:
    # The installed script imports this module before it can guard anything: Ctrl-C in its first tenth of a second.
    sys.exit(130)

app = program(
    "river-mem",
    (plan, measure, sweep, compare, doctor),
    help="Say what a model needs before it is loaded, and where every byte went afterwards.",
    epilog="MODEL is a directory, a .gguf file, a hub id (org/name, of which only the configuration is fetched), demo, "
    "or a built-in shape: llama-3.1-8b, llama-3.2-1b, phi-4-mini, ministral-3-8b, mistral-7b, qwen3-8b.",
)


def main() -> None:
    """Entry point of the installed script (see `program.run`)."""
    run(app)
