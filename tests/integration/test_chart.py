"""configs/deploy/helm: the chart passes Helm's linter, its objects fit Kubernetes and each other, wrong values are
rejected, and the manifests of configs/deploy/kubernetes are its rendering.
"""

from __future__ import annotations

import json
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from memwal.ingest.settings.load import load
from tests.conftest import ROOT
from tests.helm import helm
from tests.support.golden import golden

DEPLOY = ROOT / "configs" / "deploy"
CHART = DEPLOY / "helm"
CONFIG = DEPLOY / "kubernetes" / "memwal.toml"
OLDEST = "1.27"
EVERYTHING: Mapping[str, Any] = {
    "settings": {
        "daemon": {"drain_timeout": "1.5min", "port": 7000, "read_token": "file:/run/secrets/keys/reader"},
        "table": {"storage_options": {"secret_access_key": "env:S3_KEY", "user_agent": "it's memwal"}},
    },
    "secrets": {"name": "keys", "tls": "certificate"},
    "image": {"registry": "registry.example.com/team", "pullSecrets": [{"name": "registry"}]},
    "daemon": {
        "replicas": 5,
        "tag": "0.2.0",
        "env": [{"name": "S3_KEY", "valueFrom": {"secretKeyRef": {"name": "s3", "key": "key"}}}],
        "podAnnotations": {"team": "data"},
        "nodeSelector": {"disk": "ssd"},
        "affinity": {"podAntiAffinity": {}},
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "DoNotSchedule"},
            {"maxSkew": 2, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"},
        ],
    },
    "run": {
        "enabled": True,
        "envFrom": [{"secretRef": {"name": "s3"}}],
        "tolerations": [{"key": "dedicated", "operator": "Exists"}],
        "priorityClassName": "high",
        "checkpoint": {"size": "5Gi", "storageClassName": "fast"},
    },
    "serviceAccount": {"create": True, "annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/memwal"}},
    "networkPolicy": {"enabled": True, "from": [{"namespaceSelector": {"matchLabels": {"team": "data"}}}]},
    "monitoring": {
        "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}, "tokenKey": "reader"},
        "rules": {"enabled": True, "labels": {"release": "prometheus"}},
    },
}
"""Values that change or enable every part of the chart."""
VARIANTS: Mapping[str, Mapping[str, Any]] = {"defaults": {}, "everything": EVERYTHING}


def template(release: str, namespace: str, *more: str | Path, chart: Path = CHART) -> subprocess.CompletedProcess[str]:
    """Render the chart for the oldest Kubernetes; Helm from source would assume an older one."""
    return helm("template", release, chart, "--namespace", namespace, "--kube-version", OLDEST, *more)


def rendered(values: Mapping[str, Any], tmp_path: Path, *more: str | Path, chart: Path = CHART) -> list[dict[str, Any]]:
    """Return the objects of the release `orders` in the namespace `teams` with the configuration CONFIG."""
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(dict(values)), encoding="utf-8")
    done = template("orders", "teams", "--values", file, "--set-file", f"config={CONFIG}", *more, chart=chart)
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.safe_load_all(done.stdout) if each]


def of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """Return the objects of a kind."""
    return [each for each in objects if each["kind"] == kind]


def pods(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the templates of pods, the daemons' first."""
    found = [each["spec"]["template"] for each in objects if "template" in each.get("spec", {})]
    return sorted(found, key=lambda pod: str(pod["metadata"]["labels"]["app.kubernetes.io/component"]))


def environ_of(pod: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables of a pod with values of their own."""
    return {each["name"]: each["value"] for each in pod["spec"]["containers"][0]["env"] if "value" in each}


def leaves(values: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of each value; a table counts only if it is empty."""
    for key, value in values.items():
        yield from leaves(value, (*path, key)) if isinstance(value, dict) and value else [(*path, key)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_chart_passes_helms_linter(variant: str, tmp_path: Path) -> None:
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(dict(VARIANTS[variant])), encoding="utf-8")
    done = helm("lint", "--strict", CHART, "--values", tmp_path / "values.yaml", "--set-file", f"config={CONFIG}")
    assert done.returncode == 0, done.stdout
    assert "[WARNING]" not in done.stdout


@pytest.mark.parametrize("name", ["daemons.yaml", "run.yaml"])
def test_the_manifests_are_the_charts(name: str) -> None:
    """`--rewrite` renders them."""
    values = ("--set", "existingConfigMap=memwal", "--set", "run.enabled=true")
    done = template("memwal", "memwal", *values, "--show-only", f"templates/{name}")
    assert done.returncode == 0, done.stderr
    assert golden(str(DEPLOY / "kubernetes" / name), done.stdout).decode() == done.stdout


@pytest.mark.parametrize("variant", VARIANTS)
def test_objects_fit_the_schemas_of_kubernetes(variant: str, tmp_path: Path) -> None:
    """Those of the Prometheus operator have none there."""
    checked = [
        each
        for each in rendered(VARIANTS[variant], tmp_path)
        if not each["apiVersion"].startswith("monitoring.coreos.com/")
    ]
    assert len(checked) == {"defaults": 5, "everything": 9}[variant]
    for each in checked:
        assert each["metadata"]["namespace"] == "teams"
        for version in (OLDEST, kubernetes_validate.latest_version()):
            kubernetes_validate.validate(each, version, strict=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_objects_find_each_other(variant: str, tmp_path: Path) -> None:
    objects = rendered(VARIANTS[variant], tmp_path)
    names = {(each["kind"], each["metadata"]["name"]) for each in objects}
    assert len(names) == len(objects)
    daemons, *others = pods(objects)
    labels = [pod["metadata"]["labels"] for pod in (daemons, *others)]
    for each in objects:
        spec = each.get("spec", {})
        selector = spec.get("podSelector", spec.get("selector", {}))
        selector = selector.get("matchLabels", selector)
        selected = [one for one in labels if selector.items() <= one.items()]
        whole = each["kind"] in ("NetworkPolicy", "PodMonitor")
        own = [spec["template"]["metadata"]["labels"]] if "template" in spec else labels[: len(labels) if whole else 1]
        assert not selector or selected == own, each["kind"]
    ports = {port["name"]: port["containerPort"] for port in daemons["spec"]["containers"][0]["ports"]}
    for service in of_kind(objects, "Service"):
        assert {port["targetPort"]: port["port"] for port in service["spec"]["ports"]} == ports
    for pod in (daemons, *others):
        spec, (container,) = pod["spec"], pod["spec"]["containers"]
        assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in spec["volumes"]}
        volumes = {each["name"]: each for each in spec["volumes"]}
        assert ("ConfigMap", volumes["config"]["configMap"]["name"]) in names
        claim = volumes.get("checkpoint", {}).get("persistentVolumeClaim")
        assert claim is None or ("PersistentVolumeClaim", claim["claimName"]) in names
        account = spec["serviceAccountName"]
        assert account == "default" or ("ServiceAccount", account) in names
        for constraint in spec.get("topologySpreadConstraints", ()):
            assert constraint["labelSelector"]["matchLabels"] == pod["metadata"]["labels"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_daemons_are_the_endpoints(variant: str, tmp_path: Path) -> None:
    objects = rendered(VARIANTS[variant], tmp_path)
    (workload,) = of_kind(objects, "StatefulSet")
    headless = next(each for each in of_kind(objects, "Service") if each["spec"].get("clusterIP") == "None")
    name, service = workload["metadata"]["name"], workload["spec"]["serviceName"]
    assert service == headless["metadata"]["name"]
    assert headless["spec"]["publishNotReadyAddresses"]
    port = workload["spec"]["template"]["spec"]["containers"][0]["ports"][0]["containerPort"]
    advertised = environ_of(workload["spec"]["template"])["MEMWAL__DAEMON__ADVERTISE"]
    endpoints = [f"grpc+tls://{name}-{pod}.{service}.teams.svc:{port}" for pod in range(workload["spec"]["replicas"])]
    assert [advertised.replace("$(POD_NAME)", f"{name}-{pod}") for pod in range(len(endpoints))] == endpoints
    for pod in pods(objects):
        assert json.loads(environ_of(pod)["MEMWAL__DAEMON__ENDPOINTS"]) == endpoints


def test_settings_replace_those_of_the_configuration(tmp_path: Path) -> None:
    objects = rendered(EVERYTHING, tmp_path)
    (held,) = (each["data"]["memwal.toml"] for each in of_kind(objects, "ConfigMap"))
    assert tomllib.loads(held) == tomllib.loads(CONFIG.read_text())
    assert held.rstrip("\n") == CONFIG.read_text().rstrip("\n"), "comments and the order of columns stay"
    config = tmp_path / "memwal.toml"
    config.write_text(held)
    for pod in pods(objects):
        environ = environ_of(pod)
        environ |= {"MEMWAL__DAEMON__ADVERTISE": json.loads(environ["MEMWAL__DAEMON__ENDPOINTS"])[0]}
        settings = load(config, environ)
        options = {key: value.get_secret_value() for key, value in settings.table.storage_options.items()}
        assert options == EVERYTHING["settings"]["table"]["storage_options"]
        assert settings.daemon.read_token.get_secret_value() == "file:/run/secrets/keys/reader"
        assert (settings.daemon.port, settings.daemon.drain_timeout) == (7000, 90.0)
        assert settings.regions.count == 12


@pytest.mark.parametrize(
    ("drain", "granted"), [("0.5s", 71), ("500ms", 71), ("20s", 90), ("1.5min", 160), ("2h", 7270)]
)
def test_a_pod_is_killed_after_its_drain(drain: str, granted: int, tmp_path: Path) -> None:
    for pod in pods(rendered({"settings": {"daemon": {"drain_timeout": drain}}}, tmp_path)):
        assert pod["spec"]["terminationGracePeriodSeconds"] == granted


def test_a_changed_configuration_restarts_the_pods(tmp_path: Path) -> None:
    changed = tmp_path / "changed.toml"
    changed.write_text(CONFIG.read_text() + "\n[gc]\nenabled = true\n")

    def annotations(*more: str) -> list[dict[str, str]]:
        return [each["metadata"]["annotations"] for each in pods(rendered(EVERYTHING, tmp_path, *more))]

    before, after = annotations(), annotations("--set-file", f"config={changed}")
    assert annotations() == before
    assert all(one != other for one, other in zip(before, after, strict=True))


def test_the_monitor_scrapes_as_the_pods_require(tmp_path: Path) -> None:
    objects = rendered(EVERYTHING, tmp_path)
    (monitor,), (rule,) = of_kind(objects, "PodMonitor"), of_kind(objects, "PrometheusRule")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    for pod in pods(objects):
        (container,) = pod["spec"]["containers"]
        assert endpoint["port"] in {each["name"] for each in container["ports"]}
        assert {container[f"{kind}Probe"]["httpGet"]["scheme"] for kind in ("liveness", "readiness")} == {"HTTPS"}
        assert monitor["spec"]["jobLabel"] in pod["metadata"]["labels"]
        secrets = {each["name"]: each["secret"]["secretName"] for each in pod["spec"]["volumes"] if "secret" in each}
        assert endpoint["authorization"]["credentials"] == {"name": secrets["secrets"], "key": "reader"}
        assert endpoint["tlsConfig"]["ca"]["secret"]["name"] == secrets["tls"]
        assert f"grpc+tls://{endpoint['tlsConfig']['serverName']}:7000" in environ_of(pod)["MEMWAL__DAEMON__ENDPOINTS"]
    rules = yaml.safe_load((DEPLOY / "prometheus" / "memwal.rules.yml").read_text())
    assert rule["spec"] == rules
    assert {each["metadata"]["labels"]["release"] for each in (monitor, rule)} == {"prometheus"}


def test_a_claim_and_a_configuration_of_others_are_used(tmp_path: Path) -> None:
    values = {"run": {"enabled": True, "checkpoint": {"existingClaim": "mine"}}, "existingConfigMap": "settled"}
    objects = rendered(values, tmp_path)
    assert of_kind(objects, "PersistentVolumeClaim") == of_kind(objects, "ConfigMap") == []
    for pod in pods(objects):
        volumes = {each["name"]: each for each in pod["spec"]["volumes"]}
        assert volumes["config"]["configMap"]["name"] == "settled"
    assert volumes["checkpoint"]["persistentVolumeClaim"]["claimName"] == "mine"


def test_the_packaged_chart_is_whole(tmp_path: Path) -> None:
    """The alert rules are a link to a file outside of the chart."""
    done = helm("package", CHART, "--destination", tmp_path)
    assert done.returncode == 0, done.stderr
    (package,) = tmp_path.glob("*.tgz")
    assert rendered(EVERYTHING, tmp_path, chart=package) == rendered(EVERYTHING, tmp_path)


def test_every_value_is_in_the_schema_and_has_a_default() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())

    def named(part: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
        for key, inner in part["properties"].items():
            closed = inner.get("additionalProperties") is False
            yield from named(inner, (*path, key)) if closed else [(*path, key)]

    known = {path for path in named(schema) if path[0] not in ("global", "settings")}
    given = {path for path in leaves(values) if path[0] != "settings"}
    assert {path for path in known if not any(each[: len(path)] == path for each in given)} == set()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--set", "daemon.replica=3"), "replica"),
        (("--set", "daemon.replicas=0"), "replicas"),
        (("--set", "settings.daemon.token=secret"), "token"),
        (("--set", "settings.table.storage_options.secret_access_key=secret"), "secret_access_key"),
        (("--set", "settings.daemon.drain_timeout=20"), "drain_timeout"),
        (("--set", "settings.daemon.tls_cert="), "tls_cert"),
        (("--set-file", "config=/dev/null"), "set config (--set-file config=memwal.toml) or existingConfigMap"),
        (("--set-file", "config=SECRET"), "secret_access_key must be a reference, env:NAME or file:PATH"),
    ],
    ids=lambda value: value[1] if isinstance(value, tuple) else "",
)
def test_wrong_values_are_rejected(arguments: tuple[str, str], named: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret.toml"
    secret.write_text('[table]\nstorage_options = { region = "eu", secret_access_key = "wJalrXUtnFEMI" }\n')
    words = [each.replace("SECRET", str(secret)) for each in arguments]
    done = template("orders", "teams", "--set-file", f"config={CONFIG}", *words)
    assert done.returncode != 0
    assert named in done.stderr
    assert "wJalrXUtnFEMI" not in done.stderr


def test_versions_agree() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert chart["appVersion"] == project["version"]
    images = yaml.safe_load((DEPLOY / "kubernetes" / "kustomization.yaml").read_text())["images"]
    assert {each["newTag"] for each in images} == {chart["appVersion"]}
