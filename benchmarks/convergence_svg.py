"""Draws the runs of a convergence result: python benchmarks/convergence_svg.py RESULT.json OUT.svg

On top the training loss, a mean of 25 steps, with the validation losses as dots; below, how far each run's
validation loss lies from the first run's, in percent.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

WIDTH, HEIGHT, BELOW = 720, 300, 120
LEFT, RIGHT, TOP, GAP = 56, 130, 16, 40
COLOURS = ("#1f77b4", "#d62728", "#7f7f7f")
Points = list[tuple[float, float]]


class Panel:
    """A rectangle of the page with its own scale of values; steps are shared."""

    def __init__(self, top: float, height: float, low: float, high: float, steps: float) -> None:
        self.top, self.height, self.low, self.high, self.steps = top, height, low, high, steps

    def place(self, step: float, value: float) -> tuple[float, float]:
        """Where a point lies on the page."""
        share = (value - self.low) / (self.high - self.low)
        return LEFT + step / self.steps * (WIDTH - LEFT - RIGHT), self.top + (1 - share) * self.height

    def grid(self, ticks: list[float], form: str) -> list[str]:
        """Horizontal lines with their values."""
        found = []
        for tick in ticks:
            _, y = self.place(0, tick)
            found.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
            found.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{form.format(tick)}</text>')
        return found

    def line(self, points: Points, colour: str) -> str:
        """The points joined."""
        places = " ".join(f"{x:.1f},{y:.1f}" for x, y in (self.place(*point) for point in points))
        return f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="1.3"/>'

    def dots(self, points: Points, colour: str) -> list[str]:
        """The points by themselves."""
        places = (self.place(*point) for point in points)
        return [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]


def drawn(runs: dict[str, dict[str, Points]]) -> str:
    """The page."""
    first, last = next(iter(runs.values())), [points for run in runs.values() for points in run["train"][4:]]
    steps = max(step for step, _ in last)
    values = [value for _, value in last] + [value for run in runs.values() for _, value in run["valid"]]
    top = Panel(TOP, HEIGHT, min(values) - 0.1, max(values) + 0.1, steps)
    apart = {
        name: [
            (step, 100 * (loss / base - 1))
            for (step, loss), (_, base) in zip(run["valid"], first["valid"], strict=False)
        ]
        for name, run in runs.items()
    }
    most = max(1.0, *(abs(value) for points in apart.values() for _, value in points))
    below = Panel(TOP + HEIGHT + GAP, BELOW, -most, most, steps)
    whole = range(int(min(values)), int(max(values)) + 2)
    parts = top.grid([tick for tick in whole if top.low < tick < top.high], "{:.0f}")
    parts += below.grid([-0.5, 0, 0.5], "{:+.1f}%")
    for number, (name, run) in enumerate(runs.items()):
        colour = COLOURS[number % len(COLOURS)]
        parts += [top.line(run["train"][4:], colour), *top.dots(run["valid"], colour)]
        parts += [below.line(apart[name], colour), *below.dots(apart[name], colour)]
        y = TOP + 14 + 18 * number
        parts.append(f'<text x="{WIDTH - RIGHT + 10}" y="{y}" fill="{colour}">{name}</text>')
    for step in range(0, int(steps) + 1, 250):
        x, _ = below.place(step, 0)
        parts.append(
            f'<text x="{x:.1f}" y="{TOP + HEIGHT + GAP + BELOW + 18}" text-anchor="middle">{step}</text>'
        )
    size = f'viewBox="0 0 {WIDTH} {TOP + HEIGHT + GAP + BELOW + 28}"'
    style = 'font-family="sans-serif" font-size="12"'
    back = '<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>', back, *parts, "</svg>\n"])


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(drawn(json.loads(Path(sys.argv[1]).read_text())["runs"]))
