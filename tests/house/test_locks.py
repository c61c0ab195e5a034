"""The environment equals the lock files: the same packages and versions, and files with the hashes of their wheels."""

from __future__ import annotations

import base64
import hashlib
import re
import tomllib
from collections.abc import Iterator, Mapping
from importlib.metadata import Distribution, distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

LOCKS = ("requirements.lock", "requirements-dev.lock")
OF_THE_ENVIRONMENT = {"memwal", "pip", "setuptools", "wheel", "uv"}
"""Packages that the lock does not name: memwal itself, the packages of `venv`, and the tool that writes the locks."""
INSTALLS = re.compile(r"\bpip['\"]?,? ['\"]?(?:install|wheel)\b.*")
HASHED = ("--require-hashes", "--no-deps", "PIP_NO_INDEX=1", "pip install --quiet uv")
"""An installation checks hashes, installs only memwal, or installs only wheels that were checked before. The exception
is `make lock`, which resolves the versions again."""


def pins(root: Path, lock: str) -> Iterator[tuple[Requirement, list[str]]]:
    """Yield the packages of a lock file with their hashes."""
    for pin in re.split(r"\n(?=\S)", (root / lock).read_text(encoding="utf-8").strip()):
        wanted, *hashes = (part.strip() for part in pin.split("\\\n"))
        yield Requirement(wanted), hashes


@pytest.fixture(scope="module")
def installed() -> Mapping[str, Distribution]:
    """Return the distributions of this environment by name."""
    return {canonicalize_name(each.metadata["Name"]): each for each in distributions()}


@pytest.mark.parametrize("lock", LOCKS)
def test_every_pin_names_one_version_and_its_hashes(root: Path, lock: str) -> None:
    found = list(pins(root, lock))
    assert len(found) > 20
    for wanted, hashes in found:
        assert re.fullmatch(r"==[^=*,\s]+", str(wanted.specifier)), wanted
        assert wanted.url is None
        assert hashes, wanted
        assert [each for each in hashes if not re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", each)] == [], wanted
        assert len(set(hashes)) == len(hashes), wanted


@pytest.mark.parametrize("lock", LOCKS)
def test_what_is_installed_has_the_versions_of_the_lock(
    root: Path, lock: str, installed: Mapping[str, Distribution]
) -> None:
    wanted = {canonicalize_name(each.name): each for each, _ in pins(root, lock) if _applies(each)}
    assert wanted.keys() - installed.keys() == set(), "run make install"
    other = {
        name: installed[name].version for name, each in wanted.items() if installed[name].version not in each.specifier
    }
    assert other == {}, "run make install"


def test_nothing_is_installed_that_the_lock_does_not_name(root: Path, installed: Mapping[str, Distribution]) -> None:
    locked = {canonicalize_name(each.name) for each, _ in pins(root, "requirements-dev.lock")}
    assert installed.keys() - locked - OF_THE_ENVIRONMENT == set(), "make clean install"


def test_the_files_of_our_dependencies_are_as_their_wheels_had_them(
    root: Path, installed: Mapping[str, Distribution]
) -> None:
    """Each wheel records the hashes of its files."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for each in map(Requirement, project["dependencies"]):
        checked = 0
        for file in installed[canonicalize_name(each.name)].files or ():
            if file.hash is not None:
                found = hashlib.new(file.hash.mode, file.locate().read_bytes()).digest()
                assert base64.urlsafe_b64encode(found).rstrip(b"=").decode() == file.hash.value, file
                checked += 1
        assert checked > 3, each


def test_every_installation_checks_hashes(root: Path) -> None:
    paths = [root / name for name in ("Makefile", ".ci/run", "configs/deploy/Containerfile")]
    lines = [line for path in paths for line in path.read_text(encoding="utf-8").replace("\\\n", " ").splitlines()]
    found = [line for line in lines if INSTALLS.search(line)]
    assert len(found) >= 5
    assert [line for line in found if not any(each in line for each in HASHED)] == []


def _applies(wanted: Requirement) -> bool:
    return wanted.marker is None or wanted.marker.evaluate()
