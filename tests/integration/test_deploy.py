"""configs/deploy: every file passes its format's own checker, and names existing commands, settings, ports and paths;
the processes that it starts get ready and drain.
"""

from __future__ import annotations

import configparser
import json
import re
import shlex
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer
import yaml

import memwal
from memwal.ingest.cli.app import app
from memwal.ingest.service.daemon.workers import PAUSE_MOST
from memwal.ingest.settings.load import Settings, load, load_every
from tests.conftest import toml

ROOT = Path(__file__).resolve().parent.parent.parent
DEPLOY = ROOT / "configs" / "deploy"
KUBERNETES = sorted(path for path in (DEPLOY / "kubernetes").glob("*.yaml") if path.stem != "kustomization")
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
CONFIGURATIONS = sorted(DEPLOY.rglob("*.toml"))
PROGRAM = "/opt/memwal/bin/memwal"


def objects(path: Path) -> list[dict[str, Any]]:
    """Return the documents of a YAML file."""
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def compose() -> dict[str, Any]:
    """Return the services by name, with anchors and merges resolved."""
    return dict(objects(DEPLOY / "compose.yaml")[0]["services"])


def workloads() -> dict[str, dict[str, Any]]:
    """Return Kubernetes objects that create pods, by name."""
    found = [each for path in KUBERNETES for each in objects(path) if "template" in each.get("spec", {})]
    return {each["metadata"]["name"]: each for each in found}


def services() -> list[dict[str, Any]]:
    """Return the Services of Kubernetes."""
    return [each for path in KUBERNETES for each in objects(path) if each["kind"] == "Service"]


def container(workload: Mapping[str, Any]) -> dict[str, Any]:
    """Return the only container of an object's pods."""
    (only,) = workload["spec"]["template"]["spec"]["containers"]
    return dict(only)


def environ_of(workload: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables of an object's pods with values of their own."""
    return {each["name"]: each["value"] for each in container(workload)["env"] if "value" in each}


def settings_of_pods() -> Settings:
    """Return the settings of the first daemon in Kubernetes."""
    environ = environ_of(workloads()["memwal"])
    environ["MEMWAL__DAEMON__ADVERTISE"] = environ["MEMWAL__DAEMON__ADVERTISE"].replace("$(POD_NAME)", "memwal-0")
    return load(DEPLOY / "kubernetes" / "memwal.toml", environ)


def unit(path: Path) -> dict[str, str]:
    """Return the section [Service]."""
    parsed = configparser.RawConfigParser(strict=True)
    parsed.optionxform = str  # type: ignore[assignment,method-assign]
    parsed.read_string(path.read_text(encoding="utf-8"))
    return dict(parsed["Service"])


def instructions() -> list[tuple[str, str]]:
    """Return the instructions of the Containerfile with their arguments; continued lines are joined."""
    text = re.sub(r"\\\n\s*", "", (DEPLOY / "Containerfile").read_text(encoding="utf-8"))
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines)]


# ---- formats -------------------------------------------------------------------------------------------------------


def ran(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a program of this environment or of the machine."""
    program = Path(sys.executable).parent / str(words[0])
    command = [str(program) if program.exists() else str(words[0]), *map(str, words[1:])]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_manifests_fit_the_schemas_of_kubernetes() -> None:
    listed = objects(DEPLOY / "kubernetes" / "kustomization.yaml")[0]
    assert sorted(listed["resources"]) == sorted(path.name for path in KUBERNETES)
    for path in KUBERNETES:
        for each in objects(path):
            for version in ("1.27", kubernetes_validate.latest_version()):
                kubernetes_validate.validate(each, version, strict=True)


def test_the_jobs_of_the_readme_fit_the_schemas_of_kubernetes() -> None:
    blocks = re.findall(r"^```yaml\n(.*?)^```", (DEPLOY / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    jobs = [yaml.safe_load(block) for block in blocks]
    assert [job["kind"] for job in jobs] == ["CronJob"]
    for job in jobs:
        for version in ("1.27", kubernetes_validate.latest_version()):
            kubernetes_validate.validate(job, version, strict=True)
        (line,) = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"][0]["args"]
        words = shlex.split(line)
        assert words[:3] == ["exec", "memwal", "backup"]
        typer.main.get_command(app).commands["backup"].make_context("backup", words[3:])  # type: ignore[attr-defined]


def test_the_compose_file_fits_the_compose_specification() -> None:
    done = ran("check-jsonschema", "--builtin-schema", "vendor.compose-spec", DEPLOY / "compose.yaml")
    assert done.returncode == 0, done.stdout


def test_the_containerfile_passes_its_linter() -> None:
    # DL3008: Debian keeps no old versions of a package, so a pinned version would soon be unavailable. DL3013: pip
    # installs only wheels of the lock file, in their versions.
    ignored = [word for rule in ("DL3008", "DL3013") for word in ("--ignore", rule)]
    done = ran("hadolint", *ignored, DEPLOY / "Containerfile")
    assert (done.returncode, done.stdout) == (0, "")


if sys.platform == "linux":

    @pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
    def test_systemd_takes_the_units_and_finds_them_confined(path: Path, tmp_path: Path) -> None:
        """`systemd-analyze verify` requires the program to exist, so /bin/true replaces the installed one."""
        named = tmp_path / path.name.replace("@", "@orders")
        named.write_text(path.read_text().replace(PROGRAM, "/bin/true"))
        done = ran("systemd-analyze", "verify", "--man=no", named)
        assert (done.returncode, done.stderr) == (0, "")
        done = ran("systemd-analyze", "security", "--offline=yes", "--threshold=25", named)
        assert done.returncode == 0, done.stdout.splitlines()[-1]


# ---- secrets of the test -------------------------------------------------------------------------------------------


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    """Return the directory of secrets that the service `setup` writes."""
    made = tmp_path / "secrets"
    made.mkdir()
    for _ in range(2):  # the second time it changes nothing
        done = ran(DEPLOY / "compose" / "setup.sh", made)
        assert (done.returncode, done.stderr) == (0, "")
    (made / "ca.crt").symlink_to("tls.crt")
    return made


def in_tests(text: str, secrets: Path) -> str:
    """Return `text` with the directory of the test's secrets."""
    return re.sub("/run/secrets/memwal(-tls)?", str(secrets), text)


def placed(path: Path, secrets: Path, tmp_path: Path) -> str:
    """Return a configuration for S3 with a table in `tmp_path` and the test's secrets."""
    text = re.sub(r"\[table\.storage_options\].*?\n\n", "", path.read_text(), flags=re.DOTALL)
    return in_tests(text.replace("s3://memwal/orders.lance", str(tmp_path / "orders.lance")), secrets)


# ---- commands, settings and paths in the files ---------------------------------------------------------------------


def commands() -> Iterator[tuple[str, list[str]]]:
    """Yield every memwal command line in the files, with its place."""
    for name, service in compose().items():
        if service.get("image", "").startswith("memwal-") and "entrypoint" not in service:
            yield f"compose.yaml: {name}", service["command"]
    for name, workload in workloads().items():
        yield f"kubernetes: {name}", container(workload)["args"]
    for path in UNITS:
        program, *words = unit(path)["ExecStart"].split()
        assert program == PROGRAM
        yield path.name, words
    yield from (("Containerfile", json.loads(rest)) for word, rest in instructions() if word == "CMD")
    for block in re.findall(r"^```sh\n(.*?)^```", (DEPLOY / "README.md").read_text(), re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            called = re.search(r"(?:^|-- |daemon |/)memwal ((?:config|dlq|index|regions|[a-z]+) .*)$", line)
            if called:
                yield "README.md", shlex.split(called[1])


def test_every_command_is_one_of_ours() -> None:
    found = list(commands())
    assert len(found) >= 13
    assert {words[0] for _, words in found} >= {"serve", "run", "query", "status"}
    for where, words in found:
        command, rest = typer.main.get_command(app), list(words)
        try:
            while hasattr(command, "commands"):
                command = command.commands[rest.pop(0)]
            command.make_context(words[0], rest)
        except (KeyError, RuntimeError, typer.TyperException) as error:
            pytest.fail(f"{where}: memwal {shlex.join(words)}: {error!r}")


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=lambda path: path.relative_to(DEPLOY).as_posix())
def test_every_configuration_is_whole(path: Path) -> None:
    environ = environ_of(workloads()["memwal-run"]) if path.parent.name == "kubernetes" else {}
    (settings,) = load_every(path, environ).values()
    assert settings.daemon.http_port > 0
    assert settings.sink.http_port > 0


def test_the_configuration_of_the_units_passes_the_check(cli: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "landing").mkdir()
    places = {"MEMWAL__TABLE__URI": str(tmp_path / "t.lance"), "MEMWAL__SOURCE__PATH": str(tmp_path / "landing")}
    checked = cli("config", "check", DEPLOY / "systemd" / "orders.toml", env={"MEMWAL_TOKEN": "secret", **places})
    assert checked.code == 0, checked.err


@pytest.mark.parametrize("name", ["memwal", "memwal-run"])
def test_the_configuration_of_the_pods_passes_the_check(
    name: str, secrets: Path, cli: Callable[..., Any], tmp_path: Path
) -> None:
    config = tmp_path / "memwal.toml"
    config.write_text(placed(DEPLOY / "kubernetes" / "memwal.toml", secrets, tmp_path))
    (tmp_path / "landing").mkdir()
    source = {"FORMAT": "json", "PATH": str(tmp_path / "landing"), "BROKERS": "", "TOPICS": "[]"}  # no broker here
    environ = {name: in_tests(value, secrets) for name, value in environ_of(workloads()[name]).items()}
    environ |= {f"MEMWAL__SOURCE__{name}": value for name, value in source.items()}
    environ |= {"MEMWAL__DAEMON__ADVERTISE": json.loads(environ["MEMWAL__DAEMON__ENDPOINTS"])[0]}
    checked = cli("config", "check", config, env=environ)
    assert checked.code == 0, checked.err


def test_every_variable_is_a_setting() -> None:
    found = {
        name
        for path in DEPLOY.rglob("*")
        if path.is_file()
        for name in re.findall(r"MEMWAL__[A-Z_]+", path.read_text(encoding="utf-8"))
    }
    found.remove("MEMWAL__SECTION__KEY")
    assert len(found) > 10
    settings = Settings()
    for name in found:
        _, section, key = name.lower().split("__")
        assert hasattr(getattr(settings, section), key), name


def test_ports_agree() -> None:
    of_compose, of_kubernetes = load(DEPLOY / "compose" / "memwal.toml", {}), settings_of_pods()
    health = re.search(r"https://[0-9.]+:(\d+)/", (DEPLOY / "health.py").read_text())
    exposed = next(rest for word, rest in instructions() if word == "EXPOSE")
    for settings in (of_compose, of_kubernetes):
        assert f"{settings.daemon.port} {settings.daemon.http_port}" == exposed
        assert settings.daemon.http_port == settings.sink.http_port == int(health[1] if health else 0)
    assert compose()["daemon"]["ports"] == [f"127.0.0.1:{of_compose.daemon.port}:{of_compose.daemon.port}"]
    (job,) = objects(DEPLOY / "prometheus" / "prometheus.yml")[0]["scrape_configs"]
    assert job["static_configs"][0]["targets"] == [f"{name}:{of_compose.sink.http_port}" for name in ("daemon", "run")]
    ports = {"flight": of_kubernetes.daemon.port, "http": of_kubernetes.daemon.http_port}
    for service in services():
        assert {each["name"]: each["port"] for each in service["spec"]["ports"]} == ports
    for workload in workloads().values():
        held = {each["name"]: each["containerPort"] for each in container(workload)["ports"]}
        assert held.items() <= ports.items()
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            asked = container(workload)[probe]["httpGet"]
            assert (asked["port"], asked["scheme"]) == ("http", "HTTPS")


def test_the_certificate_of_the_readme_has_the_names_of_the_daemons() -> None:
    settings = settings_of_pods()
    namespace = objects(DEPLOY / "kubernetes" / "kustomization.yaml")[0]["namespace"]
    (client,) = (each["metadata"]["name"] for each in services() if each["spec"].get("clusterIP") != "None")
    (line,) = (line for line in (DEPLOY / "README.md").read_text().splitlines() if "subjectAltName=DNS:*" in line)
    held = re.findall(r"DNS:([\w.*-]+)", line)
    assert held == [f"*.memwal.{namespace}.svc", f"{client}.{namespace}.svc"]
    assert len(settings.daemon.endpoints) == workloads()["memwal"]["spec"]["replicas"]
    assert {endpoint.split("://")[1].split(":")[0].partition(".")[2] for endpoint in settings.daemon.endpoints} == {
        held[0].removeprefix("*.")
    }
    assert settings.regions.count >= 4 * len(settings.daemon.endpoints)


def test_secrets_are_where_the_configurations_look() -> None:
    paths = re.compile(r"/run/secrets/[\w./-]+")
    made = set(re.findall(r"^new (\w+)", (DEPLOY / "compose" / "setup.sh").read_text(), re.MULTILINE))
    made |= {"tls.crt", "tls.key"}
    for name in ("compose/memwal.toml", "prometheus/prometheus.yml", "compose.yaml"):
        for path in paths.findall((DEPLOY / name).read_text()):
            assert path == "/run/secrets/memwal" or path.removeprefix("/run/secrets/memwal/") in made, (name, path)
    readme = (DEPLOY / "README.md").read_text()
    for path in paths.findall(
        "".join((DEPLOY / "kubernetes" / name).read_text() for name in ("memwal.toml", "run.yaml"))
    ):
        if "/" in path.removeprefix("/run/secrets/"):
            assert f"--from-file={path.rsplit('/', 1)[1]}" in readme, path
    for workload in workloads().values():
        volumes = {each["name"]: each for each in workload["spec"]["template"]["spec"]["volumes"]}
        mounts = {each["mountPath"]: volumes[each["name"]] for each in container(workload)["volumeMounts"]}
        assert mounts["/run/secrets/memwal"]["secret"]["secretName"] == "memwal"
        assert mounts["/run/secrets/memwal-tls"]["secret"]["secretName"] == "memwal-tls"
        assert mounts["/etc/memwal"]["configMap"]["name"] == "memwal"
    (mapped,) = objects(DEPLOY / "kubernetes" / "kustomization.yaml")[0]["configMapGenerator"]
    assert mapped == {"name": "memwal", "files": ["memwal.toml"]}
    held = [
        name for path in DEPLOY.rglob("*") if path.is_file() for name in re.findall("BEGIN .*KEY", path.read_text())
    ]
    assert held == []


def test_services_find_each_other_and_what_they_mount() -> None:
    services, volumes = compose(), objects(DEPLOY / "compose.yaml")[0]["volumes"]
    mounts = {name: [each.split(":") for each in service.get("volumes", ())] for name, service in services.items()}
    for source, _, *_ in (mount for every in mounts.values() for mount in every):
        assert source in volumes or (source.startswith("./") and (DEPLOY / source).exists()), source
    waited = {other for service in services.values() for other in service.get("depends_on", ())}
    assert waited <= set(services)
    settings = load(DEPLOY / "compose" / "memwal.toml", {})
    urls = [
        *settings.daemon.endpoints,
        settings.table.storage_options["endpoint"].get_secret_value(),
        f"kafka://{settings.source.brokers}",
    ]
    (datasource,) = objects(DEPLOY / "grafana" / "provisioning" / "datasources" / "prometheus.yaml")[0]["datasources"]
    assert {url.split("://")[1].split(":")[0] for url in (*urls, datasource["url"])} <= set(services)
    assert f"--topic={settings.source.topics[0]}" in services["topic"]["entrypoint"]
    assert f"stack/{settings.table.uri.split('/')[2]}" in services["bucket"]["entrypoint"][-1]
    (provider,) = objects(DEPLOY / "grafana" / "provisioning" / "dashboards" / "memwal.yaml")[0]["providers"]
    assert ["./grafana", provider["options"]["path"], "ro"] in mounts["grafana"]


def test_nothing_is_killed_before_it_has_drained() -> None:
    """PAUSE_MOST: the seconds that the supervisor of `daemon.workers` grants a daemon beyond its drain."""
    longest = max(load(path, {}).daemon.drain_timeout for path in CONFIGURATIONS)
    longest = max(longest, settings_of_pods().daemon.drain_timeout) + PAUSE_MOST
    granted = [int(compose()[name]["stop_grace_period"].removesuffix("s")) for name in ("daemon", "run")]
    granted += [each["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] for each in workloads().values()]
    granted += [int(unit(path)["TimeoutStopSec"]) for path in UNITS]
    assert len(granted) == 6
    assert min(granted) > longest
    assert {unit(path)["KillMode"] for path in UNITS} == {"mixed"}, "Spark and child daemons are ended by memwal"
    assert ("STOPSIGNAL", "SIGTERM") in instructions()


def test_containers_may_do_little() -> None:
    for workload in workloads().values():
        pod, one = workload["spec"]["template"]["spec"], container(workload)
        assert pod["securityContext"]["runAsNonRoot"]
        assert one["securityContext"]["readOnlyRootFilesystem"]
        assert not one["securityContext"]["allowPrivilegeEscalation"]
        assert ("USER", str(pod["securityContext"]["runAsUser"])) == [
            each for each in instructions() if each[0] == "USER"
        ][-1]
    for name in ("daemon", "run"):
        assert compose()[name]["read_only"]
        assert compose()[name]["cap_drop"] == ["ALL"]
    assert all(port.startswith("127.0.0.1:") for service in compose().values() for port in service.get("ports", ()))
    images = [each["image"] for each in compose().values()]
    assert all(re.search(r":v?[\w.-]*\d+[.-]\d+[\w.-]*$", image) for image in images), images


def test_the_image_gets_all_of_the_package_and_nothing_else() -> None:
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = [rest.split() for word, rest in instructions() if word == "COPY"]
    sources = {
        name
        for words in copied
        for name in [w for w in words if not w.startswith("--")][:-1]
        if "--from=" not in words[0]
    }
    assert sources == sent
    assert all((ROOT / name).exists() for name in sent)
    packages = re.findall(r'^    "memwal\.(\w+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert set(packages) <= sources
    base = next(rest for word, rest in instructions() if word == "FROM")
    python = re.fullmatch(r"python:(3\.\d+)\.\d+-slim-\w+ AS base", base)
    assert python
    assert any(f"/python{python[1]}/site-packages/pyspark/jars/" in words[-1] for words in copied)


# ---- processes that the files start --------------------------------------------------------------------------------


def words_of(path: Path, config: Path) -> list[str]:
    """Return the command line of a unit, with the program of this environment and a configuration of the test."""
    words = unit(path)["ExecStart"].split()[1:]
    return [
        sys.executable,
        "-m",
        "memwal.ingest.cli.app",
        *(w.replace("/etc/memwal/%i.toml", str(config)) for w in words),
    ]


@pytest.mark.parametrize("part", ["compose", "kubernetes"])
def test_a_daemon_with_the_secrets_of_the_files_gets_ready_and_drains(
    part: str, secrets: Path, tmp_path: Path, start: Callable[..., Any]
) -> None:
    """The configuration, health check, probes and signal are those of the files; only the paths are the test's."""
    environ = environ_of(workloads()["memwal"]) if part == "kubernetes" else {}
    config = tmp_path / "memwal.toml"
    config.write_text(placed(DEPLOY / part / "memwal.toml", secrets, tmp_path))
    here = {"HOST": "localhost", "PORT": "0", "HTTP_PORT": "0", "ENDPOINTS": "[]", "ADVERTISE": ""}
    environ = {name: in_tests(value, secrets) for name, value in environ.items()}
    environ |= {f"MEMWAL__DAEMON__{name}": value for name, value in here.items()}
    daemon = start(words_of(UNITS[1], config), env=environ)
    url = daemon.line_with("metrics, health and status at").rsplit(" ", 1)[1]
    endpoint = daemon.line_with("serving").rsplit(" ", 1)[1]
    token = (secrets / "token").read_text().strip()
    with memwal.connect(endpoint, token=token, tls_ca=str(secrets / "tls.crt")) as table:
        table.put([{"id": 1, "customer": "Ada", "total": 12.5, "note": "a gift"}])
        assert table.match("note", "gift", columns=["id"])["id"].to_pylist() == [1]

    def health(path: str) -> subprocess.CompletedProcess[str]:
        script = [sys.executable, str(DEPLOY / "health.py")]
        return subprocess.run(script, env={"MEMWAL_HEALTH_URL": url + path}, capture_output=True, text=True, timeout=60)

    asked = {
        container(each)[f"{kind}Probe"]["httpGet"]["path"]
        for each in workloads().values()
        for kind in ("startup", "liveness", "readiness")
    }
    for path in asked:
        assert health(path).returncode == 0, health(path).stdout
    assert "401" in health("/status").stdout
    context = ssl.create_default_context(cafile=str(secrets / "tls.crt"))
    with urllib.request.urlopen(f"{url}/health/livez", context=context, timeout=60) as answer:
        assert answer.status == 200
    daemon.process.terminate()
    assert daemon.wait() == 0
    assert daemon.lines[-1].startswith("stopped; every acknowledged row is kept")
    assert health("/health/livez").returncode == 1
    assert not any(token in line for line in (*daemon.lines, *daemon.errors))


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_a_wrong_configuration_is_not_tried_again(path: Path, tmp_path: Path) -> None:
    (tmp_path / "wrong.toml").write_text(toml({"table": {"urj": "t.lance"}}))
    done = subprocess.run(words_of(path, tmp_path / "wrong.toml"), capture_output=True, text=True, timeout=300)
    assert str(done.returncode) in unit(path)["RestartPreventExitStatus"].split()
    assert unit(path)["Restart"] == "on-failure"
