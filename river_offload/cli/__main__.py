"""`python -m river_offload.cli`: the command line without an installed script."""

from __future__ import annotations

from river_offload.cli.app import main

if __name__ == "__main__":
    main()
