"""Fail on circles, on imports that point upwards, and on models known in two places.

These make a house hard to find one's way in.

The floors are the layers of the import contract in pyproject.toml. Every import counts, also one inside a function or
for type checking alone. Run from anywhere: python .ci/check_structure.py
"""

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "mhla_diffusers"
MOST_ROOMS = 21
"""Files and folders at the top of the package, a folder being one room."""
MOST_FLOORS = 9
"""From outside, and inside each folder, where a file stands one floor above the highest that it imports."""


def modules() -> dict[str, Path]:
    """Dotted name inside the package → file; a package's name is that of its folder."""
    found = {}
    for file in PACKAGE.rglob("*.py"):
        if file == PACKAGE / "__main__.py":  # another way into the cli and no room
            continue
        parts = file.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imports_of(name: str, file: Path, known: dict[str, Path]) -> Iterator[tuple[str, int]]:
    """Modules of the package that a file imports, with the line."""
    package = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
    package = [part for part in package if part]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        base = package[: len(package) - node.level + 1] + (node.module.split(".") if node.module else [])
        for alias in node.names:
            inner = ".".join([*base, alias.name])
            yield (inner if inner in known else ".".join(base)), node.lineno


def circles(graph: dict[str, set[str]]) -> Iterator[list[str]]:
    """Modules that import each other, directly or through others: the strongly connected parts of more than one."""
    order: list[str] = []
    seen: set[str] = set()

    def visit(name: str, edges: dict[str, set[str]], into: list[str]) -> None:
        stack = [(name, iter(sorted(edges[name])))]
        seen.add(name)
        while stack:
            current, rest = stack[-1]
            following = next((other for other in rest if other not in seen), None)
            if following is None:
                stack.pop()
                into.append(current)
            else:
                seen.add(following)
                stack.append((following, iter(sorted(edges[following]))))

    for name in sorted(graph):
        if name not in seen:
            visit(name, graph, order)
    backwards: dict[str, set[str]] = {name: set() for name in graph}
    for name, targets in graph.items():
        for target in targets:
            backwards[target].add(name)
    seen = set()
    for name in reversed(order):
        if name not in seen:
            part: list[str] = []
            visit(name, backwards, part)
            if len(part) > 1:
                yield sorted(part)


def floors_inside(graph: dict[str, set[str]], room: str) -> int:
    """Floors of the files of a folder, without the __init__ of packages, which only hand names on; no circle."""
    inside = {name for name in graph if name.startswith(f"{room}.")}
    faces = {name for name in inside if any(other.startswith(f"{name}.") for other in inside)}
    heights: dict[str, int] = {}

    def height(name: str) -> int:
        if name not in heights:
            below = max((height(target) for target in graph[name] & inside), default=0)
            heights[name] = below + (name not in faces)
        return heights[name]

    return max((height(name) for name in inside), default=0)


def family_names() -> set[str]:
    """Names that the families of the package go by."""
    table = ast.parse((PACKAGE / "families" / "table.py").read_text(encoding="utf-8"))
    calls = [
        node for node in ast.walk(table) if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "_family"
    ]
    names = {call.args[0].value for call in calls if isinstance(call.args[0], ast.Constant)}
    if not names:
        sys.exit(
            "families/table.py has no family: how they are made has changed, and .ci/check_structure.py must follow"
        )
    return names


def comparisons(file: Path, names: set[str]) -> Iterator[int]:
    """Lines that compare something with the name of a family."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Compare):
            texts = {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
            if texts & names:
                yield node.lineno
        elif isinstance(node, ast.MatchValue) and getattr(node.value, "value", None) in names:
            yield node.lineno


def main() -> None:
    """Print what is wrong and exit with 1, or say what was looked at."""
    known = modules()
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    layers = settings["tool"]["importlinter"]["contracts"][0]["layers"]
    floor_of = {
        room.strip().removeprefix("mhla_diffusers."): floor
        for floor, layer in enumerate(layers)
        for room in layer.split("|")
    }
    problems = []
    rooms = {name.split(".")[0] for name in known if name}
    problems += [f"the room {room} has no floor in pyproject.toml" for room in sorted(rooms - set(floor_of))]
    if len(rooms) > MOST_ROOMS:
        problems.append(f"{len(rooms)} rooms; at most {MOST_ROOMS} are found in two guesses")
    if len(layers) > MOST_FLOORS:
        problems.append(f"{len(layers)} floors; at most {MOST_FLOORS} are kept in mind")
    graph: dict[str, set[str]] = {name: set() for name in known}
    for name, file in known.items():
        for target, line in imports_of(name, file, known):
            # the package's own __init__ gives names to users; inside, it is asked for the version alone
            if not target or not name:
                continue
            if target != name and target in known:
                graph[name].add(target)
            here, there = name.split(".")[0], target.split(".")[0]
            if here != there and floor_of.get(there, 0) <= floor_of.get(here, 0):
                problems.append(f"{file.relative_to(ROOT)}:{line} imports {target}, which is not on a lower floor")
    in_circles = [f"these import each other: {', '.join(part)}" for part in circles(graph)]
    problems += in_circles
    inside = {} if in_circles else {room: floors_inside(graph, room) for room in sorted(rooms)}
    problems += [
        f"{room} has {floors} floors inside; at most {MOST_FLOORS} are kept in mind"
        for room, floors in inside.items()
        if floors > MOST_FLOORS
    ]
    names = family_names()
    for name, file in known.items():
        if not name.startswith("families"):
            problems += [
                f"{file.relative_to(ROOT)}:{line} compares the name of a family; ask the family instead"
                for line in comparisons(file, names)
            ]
    if problems:
        sys.exit("\n".join(problems))
    sys.stdout.write(
        f"structure: {len(known)} files, {len(rooms)} rooms on {len(layers)} floors, at most {max(inside.values())} "
        "inside a folder, no circle\n"
    )


if __name__ == "__main__":
    main()
