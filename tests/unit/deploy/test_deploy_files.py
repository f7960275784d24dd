# SPDX-License-Identifier: Apache-2.0
"""Images, scripts, manifests and skeletons of jobs pass the checks of the tools that read them."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

from dlrover.python.rl.cli.begin import CLUSTERS, write_skeleton
from dlrover.python.rl.cli.serve import serve
from dlrover.python.rl.common.errors import InvalidJob
from dlrover.python.rl.config.load import load_job
from tests.support.commands import debian_programs
from tests.support.kuberay import SCHEMAS

ROOT = Path(__file__).parents[3]
DOCKER = ROOT / "docker"
BIN = Path(sys.executable).parent
KUBERNETES = "1.33"
COMBINED = ["spot", "gpu", "kueue", "network", "monitoring"]
OVERLAYS = ["base", *COMBINED, "service", "all"]


def run(*command):
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The folder of each cluster, as ``init`` writes it for a job of another name."""
    folder = tmp_path_factory.mktemp("skeletons")
    with pytest.MonkeyPatch.context() as patch:
        for cluster in CLUSTERS:
            (folder / cluster).mkdir()
            patch.chdir(folder / cluster)
            write_skeleton("spelling", cluster)
    combine(folder / "kuberay/spelling", "all", COMBINED)
    return {cluster: folder / cluster / "spelling" for cluster in CLUSTERS}


def combine(folder, name, overlays):
    """Combine overlays as the skeleton's README says."""
    parts = [yaml.safe_load((folder / overlay / "kustomization.yaml").read_text()) for overlay in overlays]
    fields = ("resources", "patchesJson6902")
    joined = {field: [entry for part in parts for entry in part.get(field, ())] for field in fields}
    files = [file for overlay in overlays for file in (folder / overlay).iterdir() if file.stem != "kustomization"]
    assert len(files) == len({file.name for file in files})
    (folder / name).mkdir()
    for file in files:
        (folder / name / file.name).write_text(file.read_text())
    (folder / name / "kustomization.yaml").write_text(yaml.safe_dump({**parts[0], **joined}))


def test_the_image_passes_hadolint(tmp_path):
    assert run(BIN / "hadolint", DOCKER / "Dockerfile") == (0, "")
    (tmp_path / "Dockerfile").write_text("FROM debian\nRUN cd /tmp\n")
    assert run(BIN / "hadolint", tmp_path / "Dockerfile")[0] == 1


def test_image_gets_every_constraints_file_and_no_missing_path():
    context = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert all((ROOT / path).exists() for path in context)
    copies = re.findall(r"^COPY ((?!-).*) \S+$", (DOCKER / "Dockerfile").read_text(), re.M)
    copied = {path for line in copies for path in line.split()}
    assert "requirements" in copied and copied <= set(context)
    install = (DOCKER / "install.sh").read_text()
    for path in re.findall(r"requirements/[\w.-]+", install):
        assert (ROOT / path).exists(), path
    for file in (ROOT / "requirements").glob("*.txt"):
        assert file.stem in install or file.stem in ("peers", "verl", "openrlhf", "real_model"), file


def test_core_is_installed_from_a_lock_of_tested_versions():
    entry = r"^([\w.-]+)==(\S+) \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)"
    text = (ROOT / "requirements/core.lock").read_text()
    locked = {name: version for name, version, _ in re.findall(entry, text, re.M)}
    assert len(locked) == len(re.findall(r"==", text)) > 40
    assert re.sub(entry, "", text, flags=re.M).count("\n") == 1, "one line is a comment"
    lines = re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "requirements/constraints.txt").read_text(), re.M)
    tested = {name.lower().replace("_", "-"): version for name, version in lines}
    assert locked == {name: tested.get(name) for name in locked}
    core = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    required = {re.split("[^A-Za-z0-9-]", item)[0].lower() for item in core}
    assert required - locked.keys() == {"torch"}
    assert locked.keys() >= {"aiohttp-cors", "opencensus", "opentelemetry-sdk"}, "of Ray's dashboard and job API"
    assert "--require-hashes --requirement requirements/core.lock" in (DOCKER / "install.sh").read_text()


@pytest.mark.parametrize(
    ("file", "names"),
    [("compose.yaml", ("head", "worker", "job")), ("service.compose.yaml", ("head", "worker", "service"))],
)
def test_compose_is_of_its_schema_and_needs_a_token(tmp_path, file, names):
    schema = ["--builtin-schema", "vendor.compose-spec"]
    assert run(BIN / "check-jsonschema", *schema, DOCKER / file)[0] == 0
    wrong = (DOCKER / file).read_text().replace("healthcheck:", "health_check:")
    (tmp_path / "compose.yaml").write_text(wrong)
    assert run(BIN / "check-jsonschema", *schema, tmp_path / "compose.yaml")[0] == 1
    services = yaml.safe_load((DOCKER / file).read_text())["services"]
    assert all(service["shm_size"] == "2gb" for service in services.values())
    tokens = {name: service["environment"]["RAY_AUTH_TOKEN"][:19] for name, service in services.items()}
    assert tokens == dict.fromkeys(names, "${RAY_AUTH_TOKEN:?a")


@pytest.mark.parametrize("file", ["compose.yaml", "service.compose.yaml"])
def test_written_mounts_belong_to_the_user_of_the_image(file):
    """Docker makes a folder that the image lacks as root, where this user writes nothing."""
    install = r"install --directory --owner=rl --group=rl (.*)$"
    (folders,) = re.findall(install, (DOCKER / "Dockerfile").read_text(), re.M)
    services = yaml.safe_load((DOCKER / file).read_text())["services"]
    mounts = [mount for service in services.values() for mount in service["volumes"]]
    written = {mount.rpartition(":")[2] for mount in mounts if not mount.endswith(":ro")}
    assert written and written <= set(folders.split())


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_private_files_on_volumes_of_pods_stay_private(written, overlay):
    """A mount gives all files of a volume to its group by default, and a token that others can read is refused."""
    pods = pods_of(resources_of(written["kuberay"] / overlay))
    claiming = [pod for pod in pods if any("persistentVolumeClaim" in volume for volume in pod["volumes"])]
    assert claiming
    for pod in claiming:
        assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsUser"]
        assert pod["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"
        for command in pod["containers"][0].get("args", ()):
            assert "chmod -R go= /state/service" in command.partition("dlrover-rl serve")[0]


def test_containers_serve_with_options_of_the_command(written):
    compose = yaml.safe_load((DOCKER / "service.compose.yaml").read_text())["services"]
    pod = pods_of(resources_of(written["kuberay"] / "service"))[-1]
    (command,) = pod["containers"][0]["args"]
    options = {name for option in serve.params for name in option.opts}
    for text in (compose["service"]["command"][0], command):
        words = text.partition("dlrover-rl serve")[2].split()
        assert words and {word for word in words if word.startswith("--")} <= options
    assert not any("ports" in service for service in compose.values()), "nothing is published beyond loopback"
    assert "--tls-cert" in command and "--host 0.0.0.0" in command


def test_scripts_pass_shellcheck(written, tmp_path):
    scripts = [DOCKER / "install.sh", *(path for folder in written.values() for path in folder.rglob("*.s[hb]*"))]
    assert {path.name for path in scripts} == {"install.sh", "head.sh", "worker.sh", "job.sbatch"}
    assert run(BIN / "shellcheck", *scripts) == (0, "")
    (tmp_path / "wrong.sh").write_text("#!/bin/sh\nrm -rf $1/*\n")
    assert run(BIN / "shellcheck", tmp_path / "wrong.sh")[0] == 1


@pytest.mark.parametrize("container", ["none", "apptainer", "pyxis"])
def test_commands_of_the_batch_script_are_in_the_container(written, tmp_path, container):
    """Every ray, python and dlrover-rl is: on the host they end the job, as where they are not installed."""
    script = (written["slurm"] / "job.sbatch").read_text()
    options = {
        "apptainer": r"^#   (in_step=.*|inside=\(.*in_step.*)$",
        "pyxis": r"^#   (step\+=.*|inside=.*step\[.*--nodes.*)$",
    }
    if container != "none":
        script = re.sub(options[container], r"\1", script, flags=re.M)
    ray = "echo ray $1 >> $CALLS; [ $1 = start ] && exec sleep 60; exec grep -q start $CALLS"
    tools = {
        "ray": ray,
        "python": "echo python >> $CALLS; cat > /dev/null; echo 1",
        "dlrover-rl": "echo dlrover-rl >> $CALLS",
        "hostname": "echo 127.0.0.1",
        "scontrol": "echo n1",
        "apptainer": 'while [[ $1 != *.sif ]]; do shift; done; shift; PATH="$INSIDE:$PATH" exec "$@"',
        "srun": "while [[ $1 == --* ]]; do [[ $1 == --container-image* ]] && PATH=$INSIDE:$PATH; shift; done\n"
        'SLURMD_NODENAME=n1 exec "$@"',
    }
    for folder, names in {"inside": ("ray", "python", "dlrover-rl"), "host": [*tools]}.items():
        (tmp_path / folder).mkdir()
        for name in names:
            is_missing = folder == "host" and container != "none" and name in ("ray", "python", "dlrover-rl")
            text = "exit 9" if is_missing else tools[name]
            (tmp_path / folder / name).write_text(f"#!/bin/bash\n{text}\n")
            (tmp_path / folder / name).chmod(0o755)
    (tmp_path / "job.sbatch").write_text(script)
    env = {"PATH": f"{tmp_path / 'host'}:{os.environ['PATH']}", "INSIDE": str(tmp_path / "inside")}
    env |= {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NUM_NODES": "1", "SLURMD_NODENAME": "n1"}
    command = ["bash", "job.sbatch"]
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(
            command,
            cwd=tmp_path,
            env={**env, "CALLS": str(tmp_path / "calls")},
            stdout=log,
            stderr=log,
            start_new_session=True,
        ) as batch,
    ):
        try:
            code = batch.wait(30)
        finally:
            os.killpg(batch.pid, signal.SIGKILL)
    assert code == 0, (tmp_path / "log").read_text()
    assert sorted(set((tmp_path / "calls").read_text().split())) == ["dlrover-rl", "python", "ray", "start", "status"]


# -- Kubernetes -------------------------------------------------------------------------------------------------------


def resources_of(folder):
    """The resources of a kustomization, with its patches applied: what these files use of kustomize."""
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    resources = []
    for name in [*kustomization.get("bases", ()), *kustomization.get("resources", ())]:
        path = folder / name
        resources += resources_of(path.resolve()) if path.is_dir() else yaml.safe_load_all(path.read_text())
    for generator in kustomization.get("configMapGenerator", ()):
        data = {Path(file).name: (folder / file).read_text() for file in generator["files"]}
        config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": generator["name"]}, "data": data}
        resources.append(config_map)
    named = {(resource["kind"], resource["metadata"]["name"]): resource for resource in resources}
    for patch in kustomization.get("patchesJson6902", ()):
        for change in yaml.safe_load((folder / patch["path"]).read_text()):
            apply(named[patch["target"]["kind"], patch["target"]["name"]], change)
    return resources


def apply(node, change):
    *parents, last = change["path"].strip("/").split("/")
    for key in parents:
        node = node[int(key)] if isinstance(node, list) else node[key]
    if last == "-":
        node.append(change["value"])
        return
    assert change["op"] == "add" or last in node, f"{change['path']} is not there to be replaced"
    node[last] = change["value"]


def faults_of(resource):
    if resource["kind"] == "PodMonitor":  # its definition is not here
        return []
    if (key := (resource["apiVersion"], resource["kind"])) not in SCHEMAS:
        try:
            kubernetes_validate.validate(resource, KUBERNETES, strict=True)
        except kubernetes_validate.ValidationError as error:
            return [str(error)]
        return []
    validator = jsonschema.Draft202012Validator(SCHEMAS[key])
    faults = [error.message for error in validator.iter_errors(resource)]
    for template in templates_of(resource):
        faults += faults_of({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": template["spec"]})
    return faults


def templates_of(resource):
    spec = resource["spec"].get("rayClusterSpec", resource["spec"])
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]] if "headGroupSpec" in spec else []
    return [group["template"] for group in groups]


def pods_of(resources):
    """The pods of clusters and deployments."""
    templates = [template for item in resources if item["kind"].startswith("Ray") for template in templates_of(item)]
    templates += [item["spec"]["template"] for item in resources if item["kind"] == "Deployment"]
    return [template["spec"] for template in templates]


JOB = {"RayJob", "ConfigMap", "PersistentVolumeClaim"}


@pytest.mark.parametrize(
    ("overlay", "kinds"),
    [
        ("base", JOB),
        ("spot", JOB),
        ("gpu", JOB),
        ("kueue", {*JOB, "LocalQueue"}),
        ("network", {*JOB, "NetworkPolicy"}),
        ("monitoring", {*JOB, "PodMonitor"}),
        ("service", {"RayCluster", "Deployment", "Service", "PersistentVolumeClaim", "NetworkPolicy"}),
    ],
)
def test_manifests_follow_their_definitions(written, overlay, kinds):
    resources = resources_of(written["kuberay"] / overlay)
    assert {resource["kind"] for resource in resources} == kinds
    assert {resource["metadata"]["name"].partition("-")[0] for resource in resources} == {"spelling"}
    assert {resource["kind"]: faults_of(resource) for resource in resources if faults_of(resource)} == {}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kubectl_builds_the_same_resources(written, overlay, tmp_path):
    programs = debian_programs(tmp_path, "kubernetes-client", "kubectl")
    if programs is None:
        pytest.skip("neither kubectl nor apt-get is here")
    folder = written["kuberay"] / overlay
    done = subprocess.run([programs / "kubectl", "kustomize", folder], capture_output=True, text=True, check=True)
    built = {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(done.stdout)}
    ours = {(each["kind"], each["metadata"]["name"]): each for each in resources_of(folder)}
    assert built.keys() == ours.keys()
    named = json.loads(json.dumps(list(ours.values())).replace('"image": "dlrover-rl"', '"image": "dlrover-rl:core"'))
    assert named == [built[key] for key in ours]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_job_ends_its_cluster_and_can_be_suspended(written, overlay):
    """KubeRay refuses to suspend a job that selects a cluster, or keeps it; the annotation would mean Redis."""
    resources = resources_of(written["kuberay"] / overlay)
    assert "ray.io/ft-enabled" not in json.dumps(resources) and "RAY_health_check" not in json.dumps(resources)
    assert not any(resource["kind"] in ("PriorityClass", "ClusterQueue") for resource in resources), "cluster-wide"
    for job in (each for each in resources if each["kind"] == "RayJob"):
        assert job["spec"]["shutdownAfterJobFinishes"] and "clusterSelector" not in job["spec"]
        assert job["spec"].get("suspend", False) is (overlay in ("kueue", "all"))
        assert ("kueue.x-k8s.io/queue-name" in job["metadata"].get("labels", {})) is (overlay in ("kueue", "all"))


def test_job_of_the_base_runs_as_it_is_written(written):
    """The model is made on the volume, and the workers have the devices of the job."""
    folder = written["kuberay"] / "base"
    (job,) = [each for each in resources_of(folder) if each["kind"] == "RayJob"]
    described = load_job(folder / "files/job.yaml")
    assert f"--out {described.config['model']}" in job["spec"]["entrypoint"]
    (workers,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    requests = workers["template"]["spec"]["containers"][0]["resources"]["requests"]
    assert described.trainer.device_type == "CPU" and described.trainer.node_number == workers["replicas"]
    assert described.trainer.device_per_node <= int(requests["cpu"])


@pytest.mark.parametrize(
    ("overlay", "change"),
    [
        ("service", lambda spec: spec.update(headGroup={})),
        ("service", lambda spec: spec["headGroupSpec"].update(rayStartParams={"num-cpus": 0})),
        ("service", lambda spec: spec["workerGroupSpecs"][0].pop("groupName")),
        ("service", lambda spec: spec["headGroupSpec"]["template"]["spec"]["containers"][0].update(readyProbe={})),
        ("service", lambda spec: spec["headGroupSpec"]["template"]["spec"]["volumes"].append({"name": 1})),
        ("kueue", lambda spec: spec.update(clusterQeue="x")),
        ("base", lambda spec: spec["rayClusterSpec"].update(headGroup={})),
        ("base", lambda spec: spec.update(shutdownAfterJobFinishes="yes")),
    ],
)
def test_wrong_manifest_has_faults(written, overlay, change):
    resources = resources_of(written["kuberay"] / overlay)
    resource = [item for item in resources if item["kind"] in ("RayCluster", "RayJob", "LocalQueue")][-1]
    change(resource["spec"])
    assert faults_of(resource)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_name_existing_resources(written, overlay):
    resources = resources_of(written["kuberay"] / overlay)
    every = resources + resources_of(written["kuberay"] / "base")
    existing = {(item["kind"], item["metadata"]["name"]) for item in every}
    for pod in pods_of(resources):
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == volumes
        references = set()
        for volume in pod["volumes"]:
            if "persistentVolumeClaim" in volume:
                references.add(("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]))
            if "configMap" in volume:
                references.add(("ConfigMap", volume["configMap"]["name"]))
        assert references <= existing


def test_combined_options_all_have_their_effect(written):
    (job,) = [item for item in resources_of(written["kuberay"] / "all") if item["kind"] == "RayJob"]
    (workers,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    spec = workers["template"]["spec"]
    assert [toleration["key"] for toleration in spec["tolerations"]] == ["spot", "nvidia.com/gpu"]
    assert spec["nodeSelector"] and workers["replicas"] == 2 and job["spec"]["suspend"]


@pytest.mark.parametrize("overlay", ["network", "service"])
def test_policy_of_a_cluster_admits_its_pods_and_the_operator(written, overlay):
    policies = [item["spec"] for item in resources_of(written["kuberay"] / overlay) if item["kind"] == "NetworkPolicy"]
    of_clusters = [spec for spec in policies if "app" not in spec["podSelector"]["matchLabels"]]
    assert of_clusters
    for spec in of_clusters:
        peers = [peer for rule in spec["ingress"] for peer in rule["from"]]
        assert {"podSelector": spec["podSelector"]} in peers
        assert any("namespaceSelector" in peer for peer in peers)


def memory_of(text):
    return int(text.removesuffix("Gi"))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_of_a_cluster_have_probes_and_shared_memory(written, overlay):
    """Probes that Ray's agent answers, with time on a loaded cluster; without a volume the memory is 64 MB."""
    resources = resources_of(written["kuberay"] / overlay)
    templates = [template for item in resources if item["kind"].startswith("Ray") for template in templates_of(item)]
    assert len(templates) == 2
    for template in templates:
        (container,) = template["spec"]["containers"]
        for kind in ("readinessProbe", "livenessProbe"):
            probe = container[kind]
            assert probe["httpGet"] == {"path": "/api/healthz", "port": 52365}
            assert probe["timeoutSeconds"] >= 10 and probe["periodSeconds"] * probe["failureThreshold"] >= 120
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        (volume,) = [each for each in template["spec"]["volumes"] if each["name"] == mounts["/dev/shm"]]
        assert volume["emptyDir"]["medium"] == "Memory"
        limit = memory_of(container["resources"]["limits"]["memory"])
        assert 2 <= memory_of(volume["emptyDir"]["sizeLimit"]) <= limit / 2


JOB_AND_SERVICE = ("base/job.yaml", "service/cluster.yaml")
SLOTS = [
    (r"# (imagePullSecrets: .*)", r"\1", JOB_AND_SERVICE),
    (r"# priorityClassName: .*", "priorityClassName: high", JOB_AND_SERVICE),
    (r"# storageClassName: .*", "storageClassName: shared", ("base/volumes.yaml", "service/cluster.yaml")),
    (r"tolerations: \[\] +# (\[.*\])", r"tolerations: \1", ("base/job.yaml",)),
]


def test_slots_of_the_manifests_are_valid_when_filled(written, tmp_path):
    """Pull secrets, priority, tolerations and storage class; tokens are a secret that need not exist."""
    folder = tmp_path / "kuberay"
    shutil.copytree(written["kuberay"], folder)
    for pattern, value, files in SLOTS:
        for file in files:
            text, count = re.subn(pattern, value, (folder / file).read_text())
            assert count, (pattern, file)
            (folder / file).write_text(text)
    for overlay in ("base", "service"):
        resources = resources_of(folder / overlay)
        assert {item["kind"]: faults for item in resources if (faults := faults_of(item))} == {}
        claims = [item["spec"] for item in resources if item["kind"] == "PersistentVolumeClaim"]
        assert "shared" in {claim.get("storageClassName") for claim in claims}
    (job,) = [item for item in resources_of(folder / "base") if item["kind"] == "RayJob"]
    for template in templates_of(job):
        spec = template["spec"]
        assert spec["imagePullSecrets"] == [{"name": "registry"}] and spec["priorityClassName"] == "high"
        assert spec["containers"][0]["envFrom"][0]["secretRef"]["optional"]
    assert spec["tolerations"][0]["key"] == "dedicated"
    assert spec["topologySpreadConstraints"][0]["topologyKey"] == "kubernetes.io/hostname"


def test_a_pod_has_time_to_be_drained(written):
    (job,) = [item for item in resources_of(written["kuberay"] / "spot") if item["kind"] == "RayJob"]
    for group in job["spec"]["rayClusterSpec"]["workerGroupSpecs"]:
        spec = group["template"]["spec"]
        environment = {entry["name"]: entry["value"] for entry in spec["containers"][0]["env"]}
        assert int(environment["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"]) + 20 <= spec["terminationGracePeriodSeconds"]


# -- init -------------------------------------------------------------------------------------------------------------


CLI = [sys.executable, "-m", "dlrover.python.rl.master.main"]


@pytest.fixture
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_skeleton_has_the_name_and_no_other(written, cluster):
    folder = written[cluster]
    texts = [path.read_text() for path in folder.rglob("*") if path.is_file()]
    assert len(texts) >= 4
    assert not any("my-job" in text for text in texts)
    (job,) = folder.rglob("job.yaml") if cluster != "kuberay" else [folder / "base" / "files" / "job.yaml"]
    assert load_job(job).name == "spelling"
    assert all(os.access(path, os.X_OK) for path in folder.rglob("*.s[hb]*"))


@pytest.mark.parametrize(
    ("name", "message"),
    [("My_Job", "name: "), ("../out", "name: "), ("", "name: "), ("spelling", "spelling already exists")],
)
def test_skeleton_of_a_wrong_or_taken_name_is_not_written(empty_folder, name, message):
    (empty_folder / "spelling").mkdir()
    with pytest.raises(InvalidJob, match=message):
        write_skeleton(name, "local")
    assert list(empty_folder.rglob("*")) == [empty_folder / "spelling"]


@pytest.mark.slow
def test_commands_of_the_readme_run(empty_folder):
    for command in ([*CLI, "init", "spelling"], [*CLI, "init", "spelling", "--cluster", "kubray"]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    lines = re.findall(r"^    ([^#\n]+)", Path("spelling/README.md").read_text(), re.M)
    commands = [line.split() for line in lines]
    assert len(commands) == 5
    for program, *arguments in commands[:4]:
        line = [sys.executable, *arguments] if program == "python" else [*CLI, *arguments]
        done = subprocess.run(line, cwd="spelling", capture_output=True, text=True, timeout=180, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
    assert "finished" in done.stderr
