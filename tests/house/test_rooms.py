"""Rooms import each other as the table in this file allows, and no modules import each other in a cycle."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

ROOMS = {
    "ingest": {
        "mapping": "",
        "settings": "mapping",
        "api": "mapping",
        "rpc": "settings api",
        "ops": "settings rpc",
        "read": "api",
        "changes": "api read",
        "region": "api ops read",
        "table": "settings api rpc read changes region",
        "client": "api rpc table",
        "daemon": "settings api rpc ops region table client",
        "spark": "settings",
        "source": "mapping settings api spark",
        "loads": "mapping api",
        "drift": "mapping settings spark source",
        "dlq": "mapping settings api client spark source",
        "sink": "settings api rpc client daemon spark source dlq",
        "connector": "settings api rpc read changes client spark source sink",
        "fleet": "settings rpc ops table daemon spark",
        "pipeline": "mapping settings api rpc ops table client daemon spark source drift dlq sink fleet",
        "cli": "settings api rpc ops table client daemon loads dlq fleet pipeline",
    },
    "flush": {
        "base": "",
        "sst": "base",
        "commits": "base sst",
        "resizing": "base sst commits",
        "garbage": "base commits",
        "history": "base",
        "verification": "base sst commits resizing history",
        "backup": "base commits resizing verification",
    },
}
"""For each package and room, the rooms of the package that the room imports. A room imports only rooms above it."""


@pytest.fixture(params=ROOMS)
def package(request: pytest.FixtureRequest) -> str:
    """Return a package that consists of rooms."""
    return str(request.param)


@pytest.fixture
def allowed(package: str) -> dict[str, set[str]]:
    """Return, for each room of the package, the rooms that it may import."""
    return {room: set(others.split()) for room, others in ROOMS[package].items()}


def imports(source: Any, modules: set[str]) -> Iterator[str]:
    """Yield the modules of memwal that a file imports, including imports in functions and imports for types only."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            names = [alias.name.removeprefix("memwal.") for alias in node.names]
            yield from (name for name in names if name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module:
            package = f"{node.module}.".removeprefix("memwal.")
            for alias in node.names:
                inner, around = package + alias.name, package.rstrip(".")
                yield from [inner] if inner in modules else [around] if around in modules else []


def name_of(source: Any) -> str:
    """Return the import name of a module without the prefix `memwal.`, such as `ingest.api.rows`."""
    return str(source.path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@pytest.fixture
def arrows(sources: Sequence[Any]) -> dict[str, set[str]]:
    """Return, for each module, the modules that it imports."""
    modules = {name_of(source) for source in sources}
    return {name_of(source): set(imports(source, modules)) - {name_of(source)} for source in sources}


def circle(arrows: Mapping[str, set[str]]) -> list[str]:
    """Return the modules of one import cycle in order, the first one also last; an empty list without a cycle."""
    done: set[str] = set()
    for start in arrows:
        path: list[str] = []
        trail = [(start, iter(sorted(arrows[start])))] if start not in done else []
        while trail:
            module, ahead = trail[-1]
            path[len(trail) - 1 :] = [module]
            following = next(ahead, None)
            if following is None:
                done.add(trail.pop()[0])
            elif following in path[: len(trail)]:
                return [*path[path.index(following) : len(trail)], following]
            elif following not in done:
                trail.append((following, iter(sorted(arrows[following]))))
    return []


def rooms_of(targets: set[str], package: str, allowed: Mapping[str, set[str]]) -> set[str]:
    """Return the rooms of `package` that the imported modules belong to."""
    return {target.split(".")[1] for target in targets if target.startswith(f"{package}.")} & set(allowed)


def test_rooms_import_what_the_table_says(
    arrows: Mapping[str, set[str]], package: str, allowed: Mapping[str, set[str]]
) -> None:
    used: dict[str, set[str]] = {room: set() for room in allowed}
    for module, targets in arrows.items():
        top, _, rest = module.partition(".")
        room = rest.partition(".")[0]
        if top == package and room in allowed:
            used[room] |= rooms_of(targets, package, allowed) - {room}
    assert used == dict(allowed)


def test_a_room_imports_those_above_it_in_the_table_only(allowed: Mapping[str, set[str]]) -> None:
    order = list(allowed)
    assert [
        (room, other) for room, others in allowed.items() for other in others if order.index(other) > order.index(room)
    ] == []


def test_the_root_imports_no_room(
    arrows: Mapping[str, set[str]], package: str, allowed: Mapping[str, set[str]]
) -> None:
    loose = [module for module in arrows if module.startswith(f"{package}.") and module.count(".") == 1]
    root = [module for module in loose if module.split(".")[1] not in allowed]
    assert [(module, rooms_of(arrows[module], package, allowed)) for module in root] == [
        (module, set()) for module in root
    ]


def test_no_files_import_each_other_in_a_circle(arrows: Mapping[str, set[str]]) -> None:
    assert circle(arrows) == []


def test_a_circle_is_found() -> None:
    assert circle({"a": {"b"}, "b": {"c", "d"}, "c": set(), "d": {"b"}}) == ["b", "d", "b"]
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
