"""The rooms of the package and who imports whom, as a picture for docs/architecture.md.

The ground is left out: everybody may import it, and nearly everybody does.
"""

from pathlib import Path

from tests.test_house import (
    GROUND,
    LANDING,
    PROCESSES,
    ROOF,
    ROOMS,
    UPPER_PROCESSES,
    WORKSHOP,
    House,
    Module,
    inner_imports,
)

TITLES = {
    ROOF: "doors",
    UPPER_PROCESSES: "over two of them",
    PROCESSES: "processes",
    WORKSHOP: "workshop",
    LANDING: "landing",
    ROOMS: "rooms",
}


def picture() -> str:
    """A Mermaid chart: a box for each room on its floor, an arrow for each import between two."""
    house = House(Path(__file__).resolve().parents[1])
    arrows = {(module, target) for module, target, _ in inner_imports(house)}
    between = sorted(
        {
            (_name(module), _name(target))
            for module, target in arrows
            if target.floor != GROUND and _name(module) != _name(target)
        }
    )
    lines, above = ["```mermaid", "flowchart TD"], set[str]()
    for floor, title in TITLES.items():
        on_it = [module for module in house if module.floor == floor]
        lines.append(f'  subgraph floor{floor}["{floor} {title}"]')
        lines += [f"    {room}" for room in sorted({_name(each) for each in on_it} - above)]
        lines.append("  end")
        above |= {_name(each) for each in on_it}
    lines += [f"  {module} --> {target}" for module, target in between]
    return "\n".join([*lines, "```", ""])


def _name(module: Module) -> str:
    """All doors are one box; a room has its name."""
    return "doors" if module.is_door else module.room
