"""The plot of a soak: the memory of each service over time, an SVG without a dependency."""

from __future__ import annotations

from collections.abc import Sequence

from tests.soak.judge import MIB, Point
from tests.soak.run import Report

WIDTH, HEIGHT, MARGIN = 860, 360, 48
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#555555")


def plot(report: Report) -> str:
    """Return an SVG with a line for each process; a gap is a restart, a tick a fault."""
    series = {
        name.removesuffix(": memory"): points
        for name, points in report.series.items()
        if name.endswith(": memory")
    }
    top = max((p.value for points in series.values() for p in points), default=1.0) * 1.1
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        *_axes(report, top),
    ]
    for number, (name, points) in enumerate(sorted(series.items())):
        colour = COLOURS[number % len(COLOURS)]
        for life in dict.fromkeys(point.life for point in points):
            line = _line([p for p in points if p.life == life], report.seconds, top)
            parts.append(f'<polyline fill="none" stroke="{colour}" points="{line}"/>')
        x = MARGIN + 90 * number
        parts.append(f'<text x="{x}" y="16" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _axes(report: Report, top: float) -> list[str]:
    bottom, right = HEIGHT - MARGIN, WIDTH - MARGIN
    parts = [
        f'<path d="M{MARGIN} 24V{bottom}H{right}" fill="none" stroke="black"/>',
        f'<text x="{right - 60}" y="{HEIGHT - 12}">minutes</text>',
        '<text x="4" y="24">MiB</text>',
    ]
    for quarter in range(5):
        x, y = _place(quarter / 4 * report.seconds, quarter / 4 * top, report.seconds, top)
        parts.append(f'<text x="{x:.0f}" y="{bottom + 16}">{quarter / 4 * report.seconds / 60:g}'
                     "</text>")  # fmt: skip
        unit = " MiB" if quarter == 4 else ""
        parts.append(f'<text x="4" y="{y + 4:.0f}">{quarter / 4 * top / MIB:.0f}{unit}</text>')
    for at_s, what in report.marks:
        x, _ = _place(at_s, 0, report.seconds, top)
        parts.append(f'<path d="M{x:.1f} {bottom}v6" stroke="red"><title>{what}</title></path>')
    return parts


def _line(points: Sequence[Point], seconds: float, top: float) -> str:
    places = (_place(p.at_s, p.value, seconds, top) for p in points)
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)


def _place(at_s: float, value: float, seconds: float, top: float) -> tuple[float, float]:
    across = MARGIN + (WIDTH - 2 * MARGIN) * at_s / seconds
    return across, HEIGHT - MARGIN - (HEIGHT - MARGIN - 24) * value / top
