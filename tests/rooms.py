"""The rooms of the package and who imports whom, as a picture for docs/architecture.md.

The ground is left out: everybody may import it, and nearly everybody does.
"""

from pathlib import Path

from tests import test_house

TITLES = {
    test_house.ROOF: "doors",
    test_house.UPPER_PROCESSES: "over two of them",
    test_house.PROCESSES: "processes",
    test_house.WORKSHOP: "workshop",
    test_house.MIDDLE: "middle",
    test_house.ROOMS: "rooms",
}


def picture():
    """A Mermaid chart: a box for each room on its floor, an arrow for each import between two."""
    house = test_house.House(Path(__file__).resolve().parents[1])
    arrows = {
        (_name(module), _name(target))
        for module, target, _ in test_house.inner_imports(house)
        if test_house.GROUND not in (target.floor, module.floor)
    }
    lines, above = ["```mermaid", "flowchart TD"], set[str]()
    for floor, title in TITLES.items():
        on_it = {_name(module) for module in house if module.floor == floor} - above
        lines.append(f'  subgraph floor{floor}["{floor} {title}"]')
        lines += [*(f"    {room}" for room in sorted(on_it)), "  end"]
        above |= on_it
    lines += [f"  {one} --> {other}" for one, other in sorted(arrows) if one != other]
    return "\n".join([*lines, "```", ""])


def _name(module):
    """All doors are one box; a room has its name."""
    return "doors" if module.is_door else module.room
