"""How a sweep is shown: categories put together for the eye, units and names that its pictures share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

GROUPS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("full", "full-precision layers", ("backbone",)),
    ("buffers", "streaming buffers", ("slots", "staging")),
    ("river", "exit river", ("river", "river_packed", "river_scales", "river_zeros", "river_full_precision")),
    ("outside", "embedding, head, other", ("embedding", "head", "norms", "other")),
    ("kv", "KV cache", ("kv",)),
    ("working", "working memory", ()),
)
"""(key, name, categories) in the order they are stacked; the last takes every category that no other names."""
METHOD_COLORS = {
    "backbone": "#56616f",
    "quantized": "#00805d",
    "river": "#0b63a5",
    "balcony": "#c25200",
    "ee-llm": "#a0508a",
}
"""On white. Okabe and Ito's hues, darkened to a contrast of 4.5: told apart by colour-blind readers, too."""


def grouped(categories: Mapping[str, int]) -> dict[str, int]:
    """Bytes of each group, by key; the sum stays the same."""
    named = {category: key for key, _, members in GROUPS for category in members}
    found = {key: 0 for key, _, _ in GROUPS}
    for category, size_bytes in categories.items():
        found[named.get(category, GROUPS[-1][0])] += size_bytes
    return found


def kind_of(method: str) -> str:
    """`river@3` is of the kind river."""
    return method.partition("@")[0]


def unit_for(most_bytes: int) -> tuple[int, str]:
    """(bytes, name) of the unit in which a picture up to so many bytes is written."""
    return (2**30, "GiB") if most_bytes >= 2**30 else (2**20, "MiB")


def number(size_bytes: float, unit_bytes: int) -> str:
    """A size in that unit, without its name: as many digits as tell figures apart."""
    value = size_bytes / unit_bytes
    return f"{value:.2f}" if value < 100 else f"{value:.1f}"


def tokens(context: int) -> str:
    """`16K` where that is exact, else the plain number."""
    return f"{context // 1024}K" if context >= 1024 and context % 1024 == 0 else str(context)


def ticks(most: float, count: int) -> list[float]:
    """Round numbers from 0 that go beyond `most` in at most `count` steps of 1, 2 or 5 times a power of ten."""
    step = 1.0
    while step * count > most:
        step /= 10
    while True:
        for factor in (1, 2, 5):
            if step * factor * count >= most:
                steps = range(int(most / (step * factor) - 1e-9) + 2)
                return [i * step * factor for i in steps]
        step *= 10


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Positions at least `gap` apart, in the order of `wanted`, each as near to its own as the others let it.

    They stay within `low` and `high` where those have room for all.
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    clusters: list[tuple[list[int], float]] = []  # members from the top, middle of all of them
    for index in order:
        members, middle = [index], wanted[index]
        while clusters:
            above, its_middle = clusters[-1]
            if its_middle + gap * len(above) / 2 <= middle - gap * len(members) / 2:
                break
            total = len(above) + len(members)
            # The mean of what each member would give the middle of the joined cluster.
            middle = (its_middle * len(above) + middle * len(members)) / total
            members = above + members
            clusters.pop()
        half = gap * (len(members) - 1) / 2
        clusters.append((members, min(max(middle, low + half), max(high - half, low + half))))
    placed = [0.0] * len(wanted)
    for members, middle in clusters:
        for rank, index in enumerate(members):
            placed[index] = middle + gap * (rank - (len(members) - 1) / 2)
    return placed
