"""The wheel that is built from the checkout works without the checkout, whatever other files the environment has."""

from __future__ import annotations

import email
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from memwal.ingest.service.ops.live_server import FILES

ROOT = Path(__file__).resolve().parent.parent.parent
PARTS = ("ingest", "memtable", "wal", "flush")
EXTRAS = ("pyspark", "py4j", "pandas", "fastavro", "opentelemetry")
"""Import names of the packages that only `memwal[all]` installs."""


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel installed, and the directory of a user."""

    bin: Path
    home: Path

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command of the environment in the user's directory, with few variables of this process."""
        command = [str(self.bin / words[0]), *words[1:]]
        kept = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "JAVA_HOME", "LANG")}
        return subprocess.run(command, cwd=self.home, env=kept, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy, because setuptools writes files beside its sources."""
    source, built = tmp_path_factory.mktemp("source") / "checkout", tmp_path_factory.mktemp("wheel")
    source.mkdir()
    for name in ("memwal", *PARTS, "tests"):  # the wheel must not contain the tests
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", built, source],
        check=True,
        timeout=300,
    )
    return next(built.glob("memwal-*.whl"))


def installed(wheel: Path, at: Path, missing: Iterable[str] = ()) -> Installed:
    """Install the wheel in a new environment; it shares the other libraries of this process, except `missing`."""
    venv.create(at / "venv", symlinks=True)
    python = at / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", str(wheel)]
    subprocess.run(pip, check=True, timeout=300)
    (libraries := at / "libraries").mkdir()
    for each in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if "memwal" not in each.name and each.name not in missing and each.suffix != ".pth":
            (libraries / each.name).symlink_to(each)
    packages = next((at / "venv" / "lib").glob("python*/site-packages"))
    (packages / "libraries.pth").write_text(f"{libraries}\n")
    (home := at / "home").mkdir()
    return Installed(python.parent, home)


@pytest.fixture(scope="module")
def library(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Install the library without an extra."""
    return installed(wheel, tmp_path_factory.mktemp("library"), EXTRAS)


def example() -> tuple[str, list[str]]:
    """Return the Python program of the README, and the output lines that the README shows for it."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]
    return text, [line.rsplit("  # ", 1)[1] for line in text.splitlines() if line.strip().startswith("print(")]


def test_the_example_runs_beside_modules_of_a_user_that_are_called_like_ours(library: Installed) -> None:
    program, printed = example()
    for name in ("ingest.py", "flush.py", "memtable.py", "wal/__init__.py"):
        (library.home / name).parent.mkdir(exist_ok=True)
        (library.home / name).write_text("raise AssertionError('a module of the user')\n")
    (library.home / "example.py").write_text(program)
    ran = library.run("python", "example.py")
    assert (ran.returncode, ran.stdout.splitlines()) == (0, printed), ran.stderr


def test_one_package_is_installed_and_all_of_it(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
    expected = [path.relative_to(ROOT).as_posix() for part in PARTS for path in (ROOT / part).rglob("*.py")]
    page = [
        path.relative_to(ROOT).as_posix() for path in (ROOT / "ingest/service/ops/page").rglob("*") if path.is_file()
    ]
    assert {f"ingest/service/ops/page/{name}" for name in FILES} <= set(page), "what the server reads"
    expected += page
    assert sorted(names) == sorted(f"memwal/{name}" for name in [*expected, "__init__.py", "py.typed"])


def metadata(wheel: Path) -> Mapping[str, str]:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def test_spark_and_avro_are_extras(wheel: Path) -> None:
    requires = metadata(wheel).get_all("Requires-Dist")  # type: ignore[attr-defined]
    always = [line for line in requires if "extra ==" not in line]
    assert [line for line in always if line.startswith(EXTRAS)] == []
    assert {"pyspark", "pandas"} <= {
        line.split("=")[0].split("<")[0] for line in requires if 'extra == "spark"' in line
    }
    assert any(line.startswith("fastavro") and 'extra == "kafka"' in line for line in requires)


def test_a_missing_extra_is_one_line_with_the_command_that_installs_it(library: Installed) -> None:
    (library.home / "landing").mkdir()
    (library.home / "orders.toml").write_text(
        '[table]\nuri = "orders.lance"\nkey = ["id"]\ncolumns = { id = "int64" }\n'
        '[source]\nformat = "json"\npath = "landing"\n'
    )
    ran = library.run("memwal", "run", "orders.toml", "--once")
    line = "memwal: PySpark is not installed, and this needs it: pip install 'memwal[spark]'\n"
    assert (ran.returncode, ran.stdout, ran.stderr) == (2, "", line)


def test_commands_that_need_no_extra_work_without_one(library: Installed) -> None:
    (library.home / "plain.toml").write_text(
        '[table]\nuri = "plain.lance"\nkey = ["id"]\ncolumns = { id = "int64" }\n[source]\npath = "x"\n'
    )
    for command in ("init", "query", "commit"):
        ran = library.run("memwal", command, "plain.toml")
        assert (ran.returncode, ran.stderr) == (0, ""), command
    for words in (["--version"], ["run", "--help"]):
        assert library.run("memwal", *words).returncode == 0, words


def test_a_check_without_the_extra_is_about_the_table_and_what_the_source_needs(library: Installed) -> None:
    table = '[table]\nuri = "checked.lance"\nkey = ["id"]\ncolumns = { id = "int64" }\n'
    (library.home / "checked.toml").write_text(table)
    ran = library.run("memwal", "config", "check", "checked.toml")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "checked.toml: ok\n", "")
    (library.home / "files").mkdir()
    (library.home / "checked.toml").write_text(f'{table}[source]\npath = "files"\n')
    ran = library.run("memwal", "config", "check", "checked.toml")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "PySpark is not installed, and this needs it: pip install 'memwal[spark]'" in ran.stderr.splitlines()[0]


def test_a_daemon_serves_without_an_extra(library: Installed) -> None:
    (library.home / "served.toml").write_text('[table]\nuri = "s.lance"\nkey = ["id"]\ncolumns = { id = "int64" }\n')
    command = [library.bin / "memwal", "serve", "served.toml"]
    with subprocess.Popen(command, cwd=library.home, stdout=subprocess.PIPE, text=True) as daemon:
        assert daemon.stdout is not None
        endpoint = daemon.stdout.readline().rsplit(" ", 1)[1].strip()
        program = f"import memwal\nt = memwal.connect({endpoint!r})\nt.put([{{'id': 1}}])\nprint(t.count())"
        ran = library.run("python", "-c", program)
        daemon.terminate()
        assert (ran.stdout, daemon.wait(60)) == ("1\n", 0), ran.stderr


def newest_python() -> str:
    """Return the newest Python of this machine that memwal supports, on the path or installed by pyenv."""
    kept = sorted(Path(os.environ.get("PYENV_ROOT", "/nowhere")).glob("versions/3.*/bin"))
    path = os.pathsep.join([os.environ.get("PATH", ""), *map(str, kept)])
    for minor in range(14, sys.version_info.minor, -1):
        for folder in path.split(os.pathsep):  # a name on the path may be a shim of a missing version
            python = shutil.which(f"python3.{minor}", path=folder)
            if python and not subprocess.run([python, "-c", "import ensurepip"], capture_output=True).returncode:
                return python
    return sys.executable


@pytest.mark.long
def test_the_library_installs_and_runs_on_the_newest_python_of_the_machine(wheel: Path, tmp_path: Path) -> None:
    """The environment has its own copies of all libraries, as after `pip install memwal`."""
    subprocess.run([newest_python(), "-m", "venv", tmp_path / "venv"], check=True, timeout=120)
    there = Installed(tmp_path / "venv" / "bin", tmp_path)
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    (tmp_path / "versions").write_text("\n".join(line.removesuffix(" \\") for line in lock if line[:1].isalpha()))
    pip = [there.bin / "python", "-m", "pip", "install", "--quiet", "-c", tmp_path / "versions", wheel]
    subprocess.run(pip, check=True, timeout=600)  # in this process's environment, which may name an index
    program, printed = example()
    ran = there.run("python", "-c", program)
    assert ran.stdout.splitlines() == printed, ran.stderr
