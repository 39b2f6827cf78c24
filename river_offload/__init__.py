"""river-offload: 8B language models on GPUs too small for them.

A 4-bit copy of every decoder layer, the exit river, stays on the device and shares the KV cache with the model's own
layers, the backbone. Tokens are drafted on the river and checked by the backbone, whose own text it stays; in mode
exit a token leaves the backbone as soon as its state has settled and finishes on the river.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from river_offload._version import __version__

if TYPE_CHECKING:
    from river_offload.config import QuantConfig, RiverConfig
    from river_offload.handle import River
    from river_offload.loading import load, load_config

__all__ = ["QuantConfig", "River", "RiverConfig", "__version__", "load", "load_config"]

_HOMES = {
    "QuantConfig": "config",
    "RiverConfig": "config",
    "River": "handle",
    "load": "loading",
    "load_config": "loading",
}


def __getattr__(name: str) -> Any:
    """Public names are imported when they are first asked for: `import river_offload` brings no torch."""
    if name in _HOMES:
        from importlib import import_module

        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
