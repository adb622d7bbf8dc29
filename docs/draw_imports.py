"""Draw who imports whom: ``python docs/draw_imports.py OUT.svg``, in the root of a checkout.

Rooms are the top-level entries of the package, floors follow from the imports: a room stands one
floor above the highest room that it imports. Arrows that run up, and circles, are red.
"""

from __future__ import annotations

import sys

import grimp
import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot

PACKAGE = "asynckfold"


def rooms_of(graph: grimp.ImportGraph) -> dict[str, set[str]]:
    """Return what each room imports of the other rooms."""
    rooms = sorted(graph.find_children(PACKAGE))
    for room in rooms:
        if graph.find_children(room):
            graph.squash_module(room)
    short = {room: room.removeprefix(f"{PACKAGE}.") for room in rooms if "__main__" not in room}
    return {
        name: {
            short[found]
            for found in graph.find_modules_directly_imported_by(room)
            if found in short and found != room
        }
        for room, name in short.items()
    }


def floors_of(rooms: dict[str, set[str]]) -> dict[str, int]:
    """Return the floor of each room; rooms of a circle stand on one floor."""
    floors = dict.fromkeys(rooms, 0)
    for _ in rooms:
        for room, below in rooms.items():
            floors[room] = max((floors[found] + 1 for found in below), default=0)
        if all(floors[room] < len(rooms) for room in rooms) and all(
            floors[room] > floors[found] for room in rooms for found in rooms[room]
        ):
            break
    return floors


def draw(rooms: dict[str, set[str]], path: str) -> None:
    """Draw rooms on their floors."""
    floors = floors_of(rooms)
    levels = [
        [room for room in rooms if floors[room] == level]
        for level in range(max(floors.values()) + 1)
    ]
    width = max(map(len, levels))
    at = {
        room: ((place + 0.5) * width / len(level), floor)
        for floor, level in enumerate(levels)
        for place, room in enumerate(level)
    }
    figure, axes = pyplot.subplots(figsize=(max(8, 1.5 * width), max(4, 0.9 * len(levels))))
    for room, below in rooms.items():
        for found in below:
            up = floors[found] >= floors[room]
            axes.annotate(
                "",
                at[found],
                at[room],
                arrowprops={
                    "arrowstyle": "->",
                    "color": "#c0392b" if up else "#9aa5b1",
                    "lw": 0.8,
                    "shrinkA": 12,
                    "shrinkB": 12,
                    "connectionstyle": "arc3,rad=0.12",
                },
            )
    for room, (x, y) in at.items():
        box = {"boxstyle": "round,pad=0.4", "fc": "white", "ec": "#34495e"}
        axes.text(x, y, room, ha="center", va="center", fontsize=10, bbox=box)
    axes.set(xlim=(0, width), ylim=(-0.6, len(levels) - 0.4))
    axes.axis("off")
    figure.savefig(path, bbox_inches="tight")


def main() -> None:
    """Draw, and print the figures."""
    rooms = rooms_of(grimp.build_graph(PACKAGE))
    draw(rooms, sys.argv[1])
    arrows = sum(map(len, rooms.values()))
    print(f"{len(rooms)} rooms, {max(floors_of(rooms).values()) + 1} floors, {arrows} arrows")


if __name__ == "__main__":
    main()
