"""Imports go down only: boxes as the table in this file orders them, and no modules import each other in a cycle."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

ORDER = {
    "ingest": ("cli", "spark", "service", "engine", "settings", "values"),
    "flush": ("backup", "verification", "resizing", "history", "garbage", "commits", "sst", "base"),
}
"""For each package its boxes. A box imports only those behind it in its line; files beside the boxes import none."""


WRITING = ("ingest.engine.region.writer", "ingest.engine.region.core", "ingest.engine.table.embedded", "ingest.spark.")
"""Modules that write to regions or need Spark; a client loads none of them."""


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
    """Return the import name of a module without the prefix `memwal.`, such as `api.rows`."""
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


def place(module: str) -> tuple[str, int]:
    """Return the package of a module, and the place of its box in `ORDER`; files beside the boxes are the last."""
    package, _, rest = module.partition(".")
    order, box = ORDER.get(package, ()), rest.partition(".")[0]
    if not box:  # the package itself gathers its public names
        return package, -1
    return package, order.index(box) if box in order else len(order)


def test_a_box_imports_those_below_it_only(arrows: Mapping[str, set[str]]) -> None:
    upward = [
        (module, target)
        for module, targets in arrows.items()
        for target in targets
        if place(target)[0] == place(module)[0] and place(target)[1] < place(module)[1]
    ]
    assert upward == []


def test_every_folder_is_in_the_order(sources: Sequence[Any]) -> None:
    names = [name_of(source).split(".") for source in sources]
    assert {(parts[0], parts[1]) for parts in names if parts[0] in ORDER and len(parts) > 2} == {
        (package, box) for package, boxes in ORDER.items() for box in boxes
    }


def test_what_a_client_loads_is_neither_a_writer_of_regions_nor_spark(arrows: Mapping[str, set[str]]) -> None:
    seen, ahead = set[str](), ["ingest.service.client.connect"]
    while ahead:
        module = ahead.pop()
        seen.add(module)
        ahead += arrows[module] - seen
    assert [name for name in sorted(seen) if name.startswith(WRITING)] == []


def test_no_files_import_each_other_in_a_circle(arrows: Mapping[str, set[str]]) -> None:
    assert circle(arrows) == []


def test_a_circle_is_found() -> None:
    assert circle({"a": {"b"}, "b": {"c", "d"}, "c": set(), "d": {"b"}}) == ["b", "d", "b"]
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
