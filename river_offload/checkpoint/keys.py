"""The names a model expects, matched to the names a checkpoint uses."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path

from river_offload.checkpoint.headers import DTYPE_NAMES, TensorEntry
from river_offload.errors import CheckpointError

# (prefix the model expects, prefix the checkpoint has). Saved from the base model, loaded into the base model, or the
# text half of a multimodal model under one of the three places transformers has put it.
_PREFIXES = (
    ("", ""),
    ("model.", ""),
    ("", "model."),
    ("", "language_model."),
    ("model.", "model.language_model."),
    ("model.", "language_model."),
)


def match_keys(
    entries: Mapping[str, TensorEntry],
    expected: Mapping[str, tuple[int, ...]],
    tied: Mapping[str, str],
    where: Path,
) -> dict[str, str]:
    """Find every expected tensor in the checkpoint.

    Args:
        entries: the checkpoint's tensors; where: its directory, for messages.
        expected: shape by name of the model's parameters and persistent buffers.
        tied: {name: name it shares its tensor with}. One of the two is enough.

    Returns {expected name: checkpoint name}; tied names that the checkpoint does not repeat are left out.
    Raises CheckpointError when a name is missing, or is there in another shape or in a dtype that cannot be computed.
    """
    names = _rename(entries, expected, where)
    partners = {**{target: name for name, target in tied.items()}, **tied}
    matched: dict[str, str] = {}
    missing: list[str] = []
    for name in expected:
        if names[name] in entries:
            matched[name] = names[name]
        elif name not in partners or names.get(partners[name]) not in entries:
            missing.append(name)
        elif name not in tied:  # the checkpoint keeps the shared tensor under the other name only
            matched[name] = names[partners[name]]
    if missing:
        raise _missing(missing, names, entries, expected, where)
    for name, key in matched.items():
        _check_entry(name, key, entries[key], expected[name])
    return matched


def _rename(entries: Mapping[str, TensorEntry], expected: Mapping[str, tuple[int, ...]], where: Path) -> dict[str, str]:
    """The one renaming of prefixes under which most names are found; names as they are win a draw."""
    candidates = [
        {name: theirs + name.removeprefix(ours) if name.startswith(ours) else name for name in expected}
        for ours, theirs in _PREFIXES
    ]
    hits = [sum(key in entries for key in names.values()) for names in candidates]
    best = [names for names, count in zip(candidates, hits, strict=True) if count == max(hits)]
    if best[0] is not candidates[0] and any(names != best[0] for names in best[1:]):
        raise CheckpointError(
            f"{where}: holds the model's tensors under two prefixes ({min(best[0].values())} and "
            f"{min(best[1].values())}); expected one. Load the folder of the text model alone."
        )
    return best[0]


def _check_entry(name: str, key: str, entry: TensorEntry, shape: tuple[int, ...]) -> None:
    if entry.shape != tuple(shape):
        raise CheckpointError(
            f"{entry.file}: {key!r} has shape {list(entry.shape)}, the config expects {list(shape)} for {name!r}. "
            "config.json and weights are not of the same model."
        )
    if entry.dtype not in DTYPE_NAMES.values():
        raise CheckpointError(
            f"{entry.file}: {key!r} has dtype {entry.dtype}; expected F32, BF16 or F16. Use the full-precision "
            "checkpoint: the river is quantized here."
        )


def _missing(
    missing: list[str],
    names: Mapping[str, str],
    entries: Mapping[str, TensorEntry],
    expected: Mapping[str, tuple[int, ...]],
    where: Path,
) -> CheckpointError:
    name = missing[0]
    near = difflib.get_close_matches(names[name], entries, n=1, cutoff=0.5)
    found = f"{near[0]!r} {list(entries[near[0]].shape)} in {entries[near[0]].file.name}" if near else "nothing like it"
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return CheckpointError(
        f"{where}: missing tensor {name!r} {list(expected[name])}{more}; the nearest found is {found}. "
        "The checkpoint is incomplete, quantized, or of another model than config.json says."
    )
