"""Plots as PNG or SVG files. matplotlib is loaded only when one is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from lightning_zeroladder.costmodel.links import Links, Where
from lightning_zeroladder.costmodel.traffic import Collective

__all__ = ["Curve", "check_plot", "plot_curves", "plot_links"]

_SUFFIXES = (".png", ".svg")
_STYLES = {Where.INSIDE: "-", Where.ACROSS: "--"}


@dataclass(frozen=True, slots=True)
class Curve:
    """A line of a plot.

    Attributes:
        name: In the legend.
        x: Values of the swept number.
        y: One for each; None where there is nothing to show.
        dashed: Whether to draw it dashed.
    """

    name: str
    x: tuple[float, ...]
    y: tuple[float | None, ...]
    dashed: bool = False


def check_plot(path: Path) -> None:
    """Check before any work is done that a plot can be drawn there.

    Raises:
        ValueError: If its name does not end in .png or .svg, its folder is missing, or matplotlib is not installed.
    """
    if path.suffix.lower() not in _SUFFIXES:
        raise ValueError(f"plot {path}: the name has to end in {' or '.join(_SUFFIXES)}.")
    if not path.parent.is_dir():
        raise ValueError(f"plot {path}: there is no folder {path.parent}.")
    if find_spec("matplotlib") is None:
        raise ValueError('plots need matplotlib: pip install "lightning-zeroladder[plot]", or matplotlib by itself.')


def plot_links(links: Links, path: Path) -> None:
    """Draw bus bandwidth over size, a line per collective and kind of link."""
    curves = []
    for where in Where:
        for collective in Collective:
            samples = links.of(collective, where)
            if samples:
                x = tuple(float(sample.nbytes) for sample in samples)
                y = tuple(sample.bus_bytes_per_s / 1e9 for sample in samples)
                curves.append(Curve(f"{collective} {where}", x, y, dashed=_STYLES[where] == "--"))
    machine = links.machine
    plot_curves(
        curves,
        path,
        title=f"{machine.device}, {machine.nodes} x {machine.per_node} ranks, {machine.backend}, {machine.precision}",
        x_label="bytes",
        y_label="bus bandwidth in GB/s",
        log_y=True,
    )


def plot_curves(
    curves: Sequence[Curve], path: Path, *, title: str, x_label: str, y_label: str, log_y: bool = False
) -> None:
    """Draw lines over a logarithmic axis and save the picture, in the format that the name ends in."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for curve in curves:
        y = [float("nan") if value is None else value for value in curve.y]
        axes.plot(curve.x, y, "--" if curve.dashed else "-", marker="o", markersize=3, label=curve.name)
    axes.set_xscale("log", base=2)
    if log_y:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set(title=title, xlabel=x_label, ylabel=y_label)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)
