"""Line plots with logarithmic axes as SVG: the same bytes for the same numbers on every machine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

WIDTH, HEIGHT = 640, 400
LEFT, RIGHT, TOP, BOTTOM = 70, 200, 36, 50
COLOURS = ("#1b6ca8", "#d1495b", "#66a182", "#edae49", "#6b4e9b", "#777777")

Points = Sequence[tuple[float, float]]


def _powers(low: float, high: float, base: int) -> list[float]:
    """Return the powers of `base` that span an interval."""
    first = math.floor(math.log(low, base) + 1e-9)
    last = math.ceil(math.log(high, base) - 1e-9)
    return [float(base) ** k for k in range(first, max(last, first + 1) + 1)]


def _number(value: float) -> str:
    if value >= 1e4 and value % 1000 == 0:
        return f"{value / 1000:g}k"
    if value >= 1024 and value % 1024 == 0:
        return f"{value / 1024:g}Ki"
    return f"{value:g}"


class _Frame:
    """Where numbers lie in the picture; ticks at powers of two across, of ten upwards."""

    def __init__(self, lines: Mapping[str, Points]) -> None:
        across = [x for points in lines.values() for x, _ in points]
        upwards = [y for points in lines.values() for _, y in points]
        self.x_ticks = _powers(min(across), max(across), 2)
        self.y_ticks = _powers(min(upwards), max(upwards), 10)

    def x(self, value: float) -> float:
        first, last = math.log(self.x_ticks[0]), math.log(self.x_ticks[-1])
        share = (math.log(value) - first) / (last - first)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        first, last = math.log(self.y_ticks[0]), math.log(self.y_ticks[-1])
        share = (math.log(value) - first) / (last - first)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def _axes(frame: _Frame, title: str, x_label: str, y_label: str) -> list[str]:
    """Return the title, the grid and the labels."""
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = [_text((LEFT + right) / 2, 20, title), _text((LEFT + right) / 2, HEIGHT - 10, x_label)]
    middle = (TOP + bottom) / 2
    parts.append(f'<g transform="rotate(-90 16 {middle:.1f})">{_text(16, middle, y_label)}</g>')
    for tick in frame.x_ticks:
        x = frame.x(tick)
        parts.append(f'<path class="grid" d="M{x:.1f} {TOP}V{bottom}"/>')
        parts.append(_text(x, bottom + 16, _number(tick)))
    for tick in frame.y_ticks:
        y = frame.y(tick)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{right}"/>')
        parts.append(_text(LEFT - 6, y + 4, _number(tick), "end"))
    return parts


def plot(title: str, x_label: str, y_label: str, lines: Mapping[str, Points]) -> str:
    """Draw a line per name through its points, all positive, and return the SVG."""
    frame = _Frame(lines)
    parts = _axes(frame, title, x_label, y_label)
    for place, (name, points) in enumerate(lines.items()):
        colour = COLOURS[place % len(COLOURS)]
        path = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for x, y in points:
            parts.append(
                f'<circle cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="3" fill="{colour}"/>'
            )
        y = TOP + 14 + 20 * place
        parts.append(f'<circle cx="{WIDTH - RIGHT + 14}" cy="{y - 4}" r="4" fill="{colour}"/>')
        parts.append(_text(WIDTH - RIGHT + 24, y, name, "start"))
    style = "text{font:12px sans-serif;fill:#333}.grid{stroke:#ddd;fill:none}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}">',
            f"<title>{title}</title><style>{style}</style>",
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
            *parts,
            "</svg>\n",
        ]
    )
