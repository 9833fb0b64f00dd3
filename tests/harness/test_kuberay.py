"""The manifest and the commands of docs/scale-out.md against what they are for: the RayCluster
resource's fields, the options of `ray start`, and this program's own command line."""

import json
import re
import shlex
from pathlib import Path

import pytest

from harness.cli.main import main
from harness.experiment import load_experiment
from harness.topology import PD, PRFAAS

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
#: Fields of ray.io/v1, from KubeRay's API reference (docs/reference/api.md).
CLUSTER = {
    "authOptions", "autoscalerOptions", "enableInTreeAutoscaling", "gcsFaultToleranceOptions",
    "headGroupSpec",
    "headServiceAnnotations", "managedBy", "rayVersion", "suspend", "workerGroupSpecs",
}  # fmt: skip
HEAD = {"enableIngress", "headService", "rayStartParams", "serviceType", "template"}
WORKER = {
    "groupName", "idleTimeoutSeconds", "maxReplicas", "minReplicas", "numOfHosts",
    "rayStartParams", "replicas", "scaleStrategy", "suspend", "template",
}  # fmt: skip
#: What of a pod's specification (core/v1) the manifest uses.
POD = {"containers", "dnsPolicy", "hostNetwork", "nodeSelector", "volumes"}
CONTAINER = {"env", "image", "name", "ports", "resources", "volumeMounts"}


@pytest.fixture(scope="module")
def manifest() -> dict:
    return yaml.safe_load((ROOT / "deploy" / "kuberay.yaml").read_text())


def groups(manifest: dict) -> list[dict]:
    return [manifest["spec"]["headGroupSpec"], *manifest["spec"]["workerGroupSpecs"]]


def test_every_field_is_one_of_the_resource(manifest: dict) -> None:
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayCluster")
    assert manifest["metadata"].keys() == {"name"}
    spec = manifest["spec"]
    assert spec.keys() <= CLUSTER
    assert spec["headGroupSpec"].keys() <= HEAD
    for group in spec["workerGroupSpecs"]:
        assert group.keys() <= WORKER
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        assert re.fullmatch(r"[a-z0-9-]+", group["groupName"])
    for group in groups(manifest):
        assert group["template"].keys() == {"spec"}
        pod = group["template"]["spec"]
        assert pod.keys() <= POD
        assert all(container.keys() <= CONTAINER for container in pod["containers"])


def test_volumes_that_are_mounted_are_there_and_images_are_one(manifest: dict) -> None:
    images = set()
    for group in groups(manifest):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        images.add(container["image"])
        mounted = {mount["name"] for mount in container.get("volumeMounts", ())}
        assert mounted == {volume["name"] for volume in pod.get("volumes", ())}
    assert len(images) == 1


def test_ray_start_takes_the_parameters(manifest: dict) -> None:
    pytest.importorskip("ray")
    from ray.scripts.scripts import start

    known = {option for param in start.params for option in param.opts}
    for group in groups(manifest):
        for name, value in group["rayStartParams"].items():
            assert f"--{name}" in known
            assert isinstance(value, str), "KubeRay's parameters are strings"


def test_the_clusters_offer_what_the_main_job_wants(manifest: dict) -> None:
    offered = {PRFAAS: 0, PD: 0}
    for group in manifest["spec"]["workerGroupSpecs"]:
        # KubeRay puts the value on a shell's command line: quoted there, JSON inside.
        (word,) = shlex.split(group["rayStartParams"]["resources"])
        (pair,) = json.loads(word).items()
        name, units = pair
        assert name == group["groupName"]
        gpus = int(
            group["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
        )
        assert gpus >= units, "a worker on a CUDA device takes a GPU"
        offered[name] += units * group["replicas"]
    for each in load_experiment("bench").configurations:
        assert each.n_prfaas <= offered[PRFAAS]
        assert each.n_prefill + each.n_decode + 1 <= offered[PD], "the oracle wants one more"


def test_the_head_runs_no_worker_and_has_the_certificates(manifest: dict) -> None:
    head = manifest["spec"]["headGroupSpec"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    assert "resources" not in head["rayStartParams"]
    pod = head["template"]["spec"]
    (container,) = pod["containers"]
    assert {"containerPort": 6379, "name": "gcs"} in container["ports"]
    (secret,) = [v["secret"]["secretName"] for v in pod["volumes"] if "secret" in v]
    (mount,) = [m["mountPath"] for m in container["volumeMounts"] if m["name"] == "certs"]
    docs = (ROOT / "docs" / "scale-out.md").read_text()
    assert f"create secret generic {secret} " in docs
    assert f"--certs {mount}" in docs


def prfaas_commands() -> list[list[str]]:
    docs = (ROOT / "docs" / "scale-out.md").read_text()
    fenced = "\n".join(re.findall(r"```\n(.*?)```", docs, re.DOTALL)).replace("\\\n", " ")
    return [
        shlex.split(line.partition("prfaas ")[2], comments=True)
        for line in fenced.splitlines()
        if re.search(r"(^|\$ |-- )prfaas ", line)
    ]


def test_the_documents_commands_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = prfaas_commands()
    assert {words[0] for words in commands} >= {"certs", "run", "sweep"}
    for words in commands:
        seen = []
        module = f"harness.cli.{words[0]}"
        monkeypatch.setattr(f"{module}.run", lambda options, seen=seen: seen.append(options) or 0)
        assert main(words) == 0
        assert len(seen) == 1
