"""Draws the pictures of the page on concepts: `python docs/images/concepts.py` writes concepts_*.svg beside this file.

They are sketches with invented curves, which show what a word means; no run is behind them.
"""

import math
import random
from collections.abc import Callable, Iterable
from pathlib import Path

INK, GREY, PALE, PURPLE, AMBER, SHADE = "#1d2230", "#8a8f9c", "#eceaf1", "#6f2c67", "#d98a1f", "#f5e9c8"
WIDTH = 680

Point = tuple[float, float]


class Drawing:
    """An SVG file of which shapes and texts are added one after the other."""

    def __init__(self, height: int, title: str):
        self.height, self.title = height, title
        self.parts: list[str] = []

    def add(self, tag: str, content: str = "", **attributes: object) -> None:
        written = " ".join(f'{name.replace("_", "-")}="{_text(value)}"' for name, value in attributes.items())
        self.parts.append(f"<{tag} {written}>{content}</{tag}>" if content else f"<{tag} {written}/>")

    def line(self, points: Iterable[Point], color: str = INK, width: float = 1.5, dash: str = "none") -> None:
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.add("polyline", points=joined, fill="none", stroke=color, stroke_width=width, stroke_dasharray=dash)

    def box(self, x: float, y: float, w: float, h: float, fill: str, stroke: str = "none", width: float = 1.0) -> None:
        self.add("rect", x=x, y=y, width=w, height=h, rx=3, fill=fill, stroke=stroke, stroke_width=width)

    def dot(self, x: float, y: float, color: str = INK, radius: float = 4) -> None:
        self.add("circle", cx=x, cy=y, r=radius, fill=color)

    def text(self, x: float, y: float, words: str, color: str = INK, anchor: str = "start", weight: str = "normal"):
        self.add("text", words, x=x, y=y, fill=color, text_anchor=anchor, font_weight=weight)

    def arrow(self, start: Point, end: Point, color: str = INK) -> None:
        """A line with a head at its end."""
        self.line([start, end], color, 1.2)
        angle = math.atan2(end[1] - start[1], end[0] - start[0])
        sides = [(end[0] - 8 * math.cos(angle + turn), end[1] - 8 * math.sin(angle + turn)) for turn in (-0.4, 0.4)]
        self.line([sides[0], end, sides[1]], color, 1.2)

    def save(self, name: str) -> None:
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" role="img"'
        style = 'font-family="Helvetica, Arial, sans-serif" font-size="13"'
        background = f'<rect width="{WIDTH}" height="{self.height}" rx="6" fill="#ffffff"/>'
        content = "\n".join([f"<title>{self.title}</title>", background, *self.parts])
        path = Path(__file__).with_name(f"concepts_{name}.svg")
        path.write_text(f"{head} {style}>\n{content}\n</svg>\n", encoding="utf-8")


def _text(value: object) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def curve(function: Callable[[float], float], start: float, end: float, step: float = 2.0) -> list[Point]:
    """Returns points of a function from `start` to `end`, in the drawing's units."""
    count = max(2, int((end - start) / step))
    return [(x, function(x)) for x in (start + (end - start) * i / (count - 1) for i in range(count))]


def axes(drawing: Drawing, left: float, bottom: float, right: float, top: float, x: str, y: str) -> None:
    drawing.arrow((left, bottom), (right, bottom), GREY)
    drawing.arrow((left, bottom), (left, top), GREY)
    drawing.text(right, bottom + 18, x, GREY, "end")
    drawing.text(left + 8, top + 8, y, GREY)


def grid() -> None:
    drawing = Drawing(252, "A grid of four seeds and four conditions")
    names = ("control", "lr_spike 10", "lr_spike 100", "weight_noise 0.1")
    left, top, w, h = 96, 56, 112, 34
    drawing.text(left + 2 * w, 20, "conditions", GREY, "middle")
    for column, name in enumerate(names):
        drawing.text(left + column * w + w / 2 - 4, 44, name, GREY if column == 0 else INK, "middle")
        for row in range(4):
            chosen = (row, column) == (2, 2)
            fill = PURPLE if chosen else PALE if column else "#d7d9df"
            drawing.box(left + column * w, top + row * (h + 6), w - 8, h, fill)
    for row in range(4):
        drawing.text(left - 12, top + row * (h + 6) + 22, f"seed {row}", INK, "end")
    y = top + 2 * (h + 6) + h / 2
    drawing.arrow((left + 4 * w + 16, y), (left + 3 * w - 2, y), PURPLE)
    drawing.text(left + 4 * w + 22, y - 2, "one lane:", PURPLE)
    drawing.text(left + 4 * w + 22, y + 16, "seed 2,", PURPLE)
    drawing.text(left + 4 * w + 22, y + 34, "lr_spike 100", PURPLE)
    drawing.text(left, 238, "16 lanes; a row has the same initial parameters and random numbers", GREY)
    drawing.save("grid")


def fork() -> None:
    drawing = Drawing(230, "The baseline forks at the onset into lanes")
    axes(drawing, 60, 195, 640, 20, "step", "performance")
    onset = 250.0

    def learned(x: float) -> float:
        return 175 - 110 * (1 - math.exp(-(x - 60) / 110))

    def harmed(depth: float, width: float, lasting: float) -> Callable[[float], float]:
        def level(x: float) -> float:
            since = x - onset
            return learned(x) + depth * (1 - math.exp(-since / 12)) * (
                lasting + (1 - lasting) * math.exp(-since / width)
            )

        return level

    drawing.line(curve(learned, 60, onset), INK, 2.5)
    drawing.line(curve(learned, onset, 540), GREY, 2.5)
    drawing.line(curve(harmed(70, 60, 0.0), onset, 540), AMBER, 2.5)
    drawing.line(curve(harmed(95, 60, 1.0), onset, 540), PURPLE, 2.5)
    drawing.line([(onset, 20), (onset, 195)], INK, 1, "4 3")
    drawing.dot(onset, learned(onset))
    drawing.text(onset, 212, "onset", INK, "middle")
    drawing.text(116, 168, "baseline, trained", INK)
    drawing.text(116, 185, "once per seed", INK)
    drawing.text(onset + 10, 38, "fork", INK)
    drawing.text(548, 67, "control", GREY)
    drawing.text(548, 88, "magnitude 10", AMBER)
    drawing.text(548, 164, "magnitude 100", PURPLE)
    drawing.save("fork")


def window() -> None:
    rows = (
        ("duration=10", [(0.3, 0.4)]),
        ('duration="once"', [(0.3, 0.31)]),
        ('duration="end"', [(0.3, 1.0)]),
        ("duration=10, period=25", [(0.3, 0.4), (0.55, 0.65), (0.8, 0.9)]),
    )
    drawing = Drawing(212, "Windows of four durations")
    left, right = 190, 640
    onset = left + 0.3 * (right - left)
    for index, (name, openings) in enumerate(rows):
        y = 34 + 34 * index
        drawing.text(left - 12, y + 14, name, INK, "end")
        drawing.box(left, y, right - left, 20, PALE)
        for start, stop in openings:
            drawing.box(left + start * (right - left), y, (stop - start) * (right - left), 20, PURPLE)
    drawing.line([(onset, 18), (onset, 172)], INK, 1, "4 3")
    drawing.text(onset, 14, "onset=0.3", INK, "middle")
    drawing.text(left, 188, "step 0", GREY)
    drawing.text(right, 188, "step 100", GREY, "end")
    drawing.text(onset, 188, "step 30", GREY, "middle")
    drawing.save("window")


def magnitude() -> None:
    drawing = Drawing(210, "A learning rate in three conditions")
    axes(drawing, 60, 170, 520, 20, "step", "learning rate (log scale)")
    start, stop, base = 210, 290, 140
    drawing.box(start, 34, stop - start, 136, SHADE)
    for height, color in ((95, PURPLE), (47, AMBER)):
        drawing.line([(start, base), (start, base - height), (stop, base - height), (stop, base)], color, 2.5)
    drawing.line([(60, base), (520, base)], GREY, 2.5)
    drawing.text(start + 40, 188, "window", INK, "middle")
    drawing.text(530, base + 5, "control: factor 1", GREY)
    drawing.text(stop + 10, base - 43, "magnitude 3", AMBER)
    drawing.text(stop + 10, base - 90, "magnitude 10", PURPLE)
    drawing.save("magnitude")


def collapse() -> None:
    drawing = Drawing(290, "Performance that leaves its band and collapses")
    axes(drawing, 60, 245, 650, 20, "step", "J (performance)")
    noise, onset, mean, sigma = random.Random(3), 250, 90, 11
    edge = mean + 2 * sigma
    drawing.box(110, mean - 2 * sigma, onset - 110, 4 * sigma, SHADE)
    drawing.line([(110, mean), (onset, mean)], AMBER, 1.5)
    drawing.line([(onset, edge), (640, edge)], AMBER, 1.5, "6 4")

    def level(x: float) -> float:
        if x < onset:
            return mean
        if x < 340:
            return mean + 65 * math.exp(-(((x - 285) / 20) ** 2))
        return mean + 90 / (1 + math.exp(-(x - 400) / 9))

    points = [(x, level(x) + noise.gauss(0, sigma if x < onset else 7)) for x in range(60, 641, 4)]
    first = next(i for i, (x, y) in enumerate(points) if x > 380 and y > edge)
    points[first:] = [(x, max(y, edge + 4)) for x, y in points[first:]]
    drawing.line(points, INK, 1.8)
    at = points[first][0]
    drawing.line([(onset, 20), (onset, 245)], INK, 1, "4 3")
    drawing.line([(at, 50), (at, 245)], PURPLE, 1.2, "4 3")
    drawing.text(onset, 263, "onset", INK, "middle")
    drawing.text(at, 263, "collapse time T_c", PURPLE, "middle")
    drawing.text(110, 136, "level J_pre and", AMBER)
    drawing.text(110, 153, "band ± 2 sigma_pre", AMBER)
    drawing.text(110, 170, "before the onset", AMBER)
    drawing.text(640, edge - 8, "J_pre - 2 sigma_pre", AMBER, "end")
    drawing.text(302, 184, "too short:", GREY, "middle")
    drawing.text(302, 201, "no collapse", GREY, "middle")
    drawing.arrow((at + 4, 222), (at + 110, 222), PURPLE)
    drawing.arrow((at + 110, 222), (at + 4, 222), PURPLE)
    drawing.text(at + 118, 227, "at least hold steps", PURPLE)
    drawing.save("collapse")


def critical() -> None:
    drawing = Drawing(285, "Thresholds of the seeds and the share that collapses")
    left, right, top, bottom = 110, 620, 36, 165
    axes(drawing, left, bottom, right + 24, top - 18, "magnitude (log scale)", "share of seeds that collapse")
    thresholds = [190, 262, 330, 352, 386, 420, 470, 548]
    critical_at = (thresholds[3] + thresholds[4]) / 2
    for count, share in ((0, "0"), (4, "1/2"), (8, "1")):
        drawing.text(left - 10, bottom - count * 14 + 5, share, GREY, "end")
    steps: list[Point] = [(left, bottom)]
    for count, x in enumerate(thresholds):
        steps += [(x, bottom - count * 14), (x, bottom - (count + 1) * 14)]
    drawing.line([*steps, (right, bottom - 8 * 14)], PURPLE, 2.5)
    drawing.line([(left, bottom - 56), (critical_at, bottom - 56), (critical_at, 236)], INK, 1, "4 3")
    drawing.text(left, 218, "threshold of", GREY, "end")
    drawing.text(left, 234, "each seed", GREY, "end")
    drawing.line([(left + 14, 220), (right, 220)], PALE, 2)
    for x in thresholds:
        drawing.dot(x, 220, PURPLE, 5)
    drawing.text(critical_at, 256, "critical magnitude (margin)", INK, "middle")
    drawing.box(thresholds[1], 264, thresholds[6] - thresholds[1], 5, AMBER)
    drawing.text(thresholds[6] + 10, 272, "its interval", AMBER)
    drawing.save("critical")


def meta_state() -> None:
    drawing = Drawing(250, "Paths of the meta-state of undisturbed runs and of a disturbed one")
    axes(drawing, 60, 215, 640, 20, "first coordinate of the meta-state", "second coordinate")
    noise = random.Random(1)

    def path(x: float) -> float:
        return 190 - 95 * (1 - math.exp(-(x - 80) / 160)) + 12 * math.sin(x / 60)

    for _ in range(9):
        shift, phase = noise.gauss(0, 7), noise.uniform(0, 6)
        drawing.line(curve(lambda x, s=shift, p=phase: path(x) + s + 3 * math.sin(x / 22 + p), 80, 560), "#c9ccd4", 1.3)
    onset = 280.0
    away = [(x, path(x) + 2 * math.sin(x / 20)) for x in range(80, int(onset) + 1, 4)]
    away += [
        (onset + 190 * t, path(onset) + 10 * t + 85 * t**2 + 4 * math.sin(20 * t)) for t in (i / 40 for i in range(41))
    ]
    drawing.line(away, PURPLE, 2.4)
    drawing.dot(onset, path(onset) + 2 * math.sin(onset / 20))
    drawing.text(onset, path(onset) - 28, "onset", INK, "middle")
    drawing.text(566, path(560) + 4, "undisturbed", GREY)
    drawing.text(566, path(560) + 20, "runs", GREY)
    drawing.text(away[-1][0] + 8, away[-1][1], "disturbed run", PURPLE)
    drawing.save("meta_state")


if __name__ == "__main__":
    for draw in (grid, fork, window, magnitude, collapse, critical, meta_state):
        draw()
