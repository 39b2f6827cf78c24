"""The picture of `eval.fidelity`: agreement and KL over backbone layers a token, one panel for each way of reading."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from river_offload.eval.fidelity import Point

_LOOKS = {"tau": ("o-", "tau (mode exit)"), "gate": ("s-", "gate (mode gated)"), "lossless": ("*", "lossless")}
_READINGS = {"teacher": "on the backbone's text", "free": "on its own text"}


def draw(points: Sequence[Point], path: Path, title: str) -> None:
    """Write the picture to `path`, in the format that its ending names."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2, sharex=True)
    for column, (forcing, reading) in enumerate(_READINGS.items()):
        for row, (name, label) in enumerate((("agreement", "agreement with the backbone"), ("kl", "KL, nats"))):
            axis = axes[row][column]
            for curve, (style, curve_label) in _LOOKS.items():
                of_curve = sorted(
                    (point for point in points if (point.curve, point.forcing) == (curve, forcing)),
                    key=lambda point: point.layers_per_token,
                )
                if of_curve:
                    xs = [point.layers_per_token for point in of_curve]
                    axis.plot(xs, [getattr(point, name) for point in of_curve], style, label=curve_label)
            axis.set_ylabel(label)
            axis.grid(alpha=0.3)
        axes[0][column].set_title(reading)
        axes[1][column].set_xlabel("backbone layers a token")
    axes[0][0].legend()
    figure.suptitle(title)
    figure.savefig(path)
