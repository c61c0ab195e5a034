"""`make` on incomplete machines: one line that names what to install, before anything is set up."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


def make(target: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a target of the project's Makefile in `cwd` with only the given environment."""
    command = [shutil.which("make") or "make", "-f", str(ROOT / "Makefile"), target]
    return subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=300)


def fake(directory: Path, name: str, script: str) -> Path:
    """Write an executable shell script."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / name
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """Return a PATH with the programs of the Makefile's checks, but without Java and Python."""
    directory = tmp_path / "bin"
    directory.mkdir()
    for name in ("sh", "sed", "head"):
        (directory / name).symlink_to(str(shutil.which(name)))
    return directory


@pytest.mark.parametrize(
    ("script", "found"),
    [
        (None, "java does not run"),
        ("exit 1", "java does not run"),
        ("echo 'openjdk version \"11.0.2\" 2019-01-15' >&2", "java is version 11"),
        ("echo 'java version \"1.8.0_392\"' >&2", "java is version 8"),
    ],
)
@pytest.mark.parametrize("target", ["run", "test"])
def test_without_a_fit_java_one_line_names_the_package(
    tools: Path, tmp_path: Path, target: str, script: str | None, found: str
) -> None:
    if script is not None:
        fake(tools, "java", script)
    ran = make(target, tmp_path, PATH=str(tools))
    (line,) = ran.stderr.splitlines()
    assert ran.returncode != 0
    assert f"Java 17 or later is needed, {found}" in line
    assert "openjdk-17-jre-headless" in line
    assert not (tmp_path / ".venv").exists()


def test_java_home_goes_before_the_path(tools: Path, tmp_path: Path) -> None:
    fake(tools, "java", "echo 'openjdk version \"21\"' >&2")
    home = tmp_path / "old jdk"
    fake(home / "bin", "java", "echo 'openjdk version \"11.0.2\"' >&2")
    assert make("java", tmp_path, PATH=str(tools)).returncode == 0
    ran = make("java", tmp_path, PATH=str(tools), JAVA_HOME=str(home))
    assert ran.returncode != 0
    assert f"{home}/bin/java is version 11" in ran.stderr


def test_without_python_one_line_names_the_package(tools: Path, tmp_path: Path) -> None:
    for name in ("pyproject.toml", "requirements.lock", "requirements-dev.lock"):
        (tmp_path / name).write_text("", encoding="utf-8")
    fake(tools, "python3", "exit 127")
    ran = make("install", tmp_path, PATH=str(tools))
    (line,) = ran.stderr.splitlines()
    assert ran.returncode != 0
    assert "Python 3.11 or later with venv is needed" in line
    assert "python3-venv" in line


def test_without_a_browser_one_line_names_the_package(tools: Path, tmp_path: Path) -> None:
    fake(tools, "java", "echo 'openjdk version \"21\"' >&2")
    fake(tools, "chromium-browser", "exit 1")  # for example a name that starts an installer
    ran = make("test", tmp_path, PATH=str(tools))
    (line,) = ran.stderr.splitlines()
    assert ran.returncode != 0
    assert "Chromium is needed" in line
    assert "apt-get install chromium" in line
    assert not (tmp_path / ".venv").exists()
    other = fake(tmp_path / "a folder", "chrome", "echo Chromium 150")
    assert make("browser", tmp_path, PATH=str(tools), CHROMIUM=str(other)).returncode == 0


def test_help_lists_every_target() -> None:
    ran = make("help", ROOT, PATH=os.environ["PATH"])
    for target in ("install", "run", "test", "s3-server", "promtool", "kafka", "lint", "bench"):
        assert f"make {target} " in ran.stdout
