"""Checks streaming on the machine at hand, a borrowed GPU above all, and prints one JSON object.

    python tools/check_gpu.py [--device auto] [--large llama-3.1-8b] [--seconds 440] [--out gpu.json]

No network, no downloads: it writes its own checkpoints of random weights. The river is quantized by rounding to
nearest, whether hqq is there or not: speed, bytes and equality do not depend on how well the weights are rounded. A
check that fails or cannot be run says why, and the others go on; with --out the file is rewritten after each, so that a
machine taken away in the middle leaves what was found. Exit code 0: all that ran is right.

The checks are in gpu_checks.py, what they stand on in gpu_ground.py.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from gpu_checks import CHECKS
from gpu_ground import (
    FAMILIES,
    LARGE,
    LARGE_LAYERS,
    SMALL,
    Failed,
    Result,
    Rig,
    Skipped,
    collect,
    nearest_rounding,
    write_checkpoint,
)

from river_offload.errors import RiverError


def environment(device: torch.device) -> Result:
    found: Result = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hqq": importlib.util.find_spec("hqq") is not None,
        "device": str(device),
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"gpu": properties.name, "capability": f"{properties.major}.{properties.minor}",
                  "gpu_bytes": properties.total_memory, "cuda": torch.version.cuda}  # fmt: skip
    return found


def run_checks(rig: Rig, names: list[str], report: Callable[[str, Result], None]) -> None:
    """Run the checks in order; what one of them meets does not end the others."""
    for check in CHECKS:
        if names and check.__name__ not in names:
            continue
        started = time.monotonic()
        result: Result = {"ok": True}
        try:
            if rig.left_s() < 20:
                raise Skipped(f"{rig.left_s():.0f} s are left")
            result |= check(rig)
        except Skipped as reason:
            result = {"ok": None, "skipped": str(reason)}
        except Failed as failure:
            result = {"ok": False, "failed": str(failure), **failure.figures}
        except (RiverError, RuntimeError, ArithmeticError, AssertionError, AttributeError, ImportError, LookupError,
                OSError, TypeError, ValueError) as error:  # fmt: skip
            # One borrowed machine, one try: whatever breaks is written down, and the next check runs.
            result = {"ok": False, "failed": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        report(check.__name__, result | {"seconds": round(time.monotonic() - started, 2)})
        collect(rig)


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, check, print the JSON object, return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--large", help="built-in shape of the large checkpoint; none leaves it out")
    parser.add_argument("--layers", type=int, help="its number of layers, if not the model's own")
    parser.add_argument("--seconds", type=float, default=440.0, help="checks that would start later are skipped")
    parser.add_argument("--only", action="append", default=[], choices=[check.__name__ for check in CHECKS])
    parser.add_argument(
        "--folder", type=Path, help="where checkpoints are written (16 GB for 8B); else a temporary one"
    )
    parser.add_argument("--out", type=Path, help="a file that gets the JSON object too, anew after every check")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    wanted = options.device
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(wanted, 0) if wanted == "cuda" else torch.device(wanted)
    found: Result = {"ok": None, "environment": {}, "checks": {}}

    def report(name: str, result: Result) -> None:
        found["checks"][name] = result
        outcome = {True: "ok", False: "FAILED", None: "skipped"}[result["ok"]]
        print(f"{name:<18} {outcome:<8} {result['seconds']:6.1f} s  {result.get('failed', '')}", file=sys.stderr)
        if options.out is not None:
            options.out.write_text(json.dumps(found) + "\n", encoding="utf-8")

    # What libraries say about configurations this small is of no use here.
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with nearest_rounding(), tempfile.TemporaryDirectory(prefix="check-gpu-", dir=options.folder) as folder:
        large = options.large or LARGE[wanted]
        rig = Rig(device, Path(folder), large, started + options.seconds)
        found["environment"] = environment(device)
        rig.models["small"] = write_checkpoint(rig.folder / "small", FAMILIES[0], 0.08, **SMALL)
        if large != "none":
            layers = options.layers or LARGE_LAYERS[wanted]
            changes = {} if layers is None else {"num_hidden_layers": layers}
            rig.models["large"] = write_checkpoint(rig.folder / "large", large, 0.02, **changes)
        run_checks(rig, options.only, report)
    found["ok"] = all(result["ok"] is not False for result in found["checks"].values())
    found["seconds"] = round(time.monotonic() - started, 1)
    if options.out is not None:
        options.out.write_text(json.dumps(found) + "\n", encoding="utf-8")
    print(json.dumps(found))
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
