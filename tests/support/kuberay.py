# SPDX-License-Identifier: Apache-2.0
"""The fields of KubeRay's resources, as its API reference (ray.io/v1, KubeRay 1.5) lists them, as JSON schemas.

The published definitions repeat every field of a pod; here Kubernetes' own schema judges the pods.
"""

TEXT, FLAG, COUNT = {"type": "string"}, {"type": "boolean"}, {"type": "integer", "minimum": 0}
TEXTS = {"type": "object", "additionalProperties": TEXT}
ANY = {"type": "object"}


def _each(kind, names):
    return dict.fromkeys(names.split(), kind)


def _object(required=(), **properties):
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


POD_TEMPLATE = _object(["spec"], metadata=ANY, spec=ANY)

HEAD = _object(
    ["template"],
    template=POD_TEMPLATE,
    headService=ANY,
    enableIngress=FLAG,
    serviceType={"enum": ["ClusterIP", "NodePort", "LoadBalancer", "ExternalName"]},
    **_each(TEXTS, "resources labels rayStartParams"),
)

WORKERS = _object(
    ["groupName", "template"],
    groupName=TEXT,
    suspend=FLAG,
    template=POD_TEMPLATE,
    scaleStrategy=_object(workersToDelete={"type": "array", "items": TEXT}),
    **_each(COUNT, "replicas minReplicas maxReplicas idleTimeoutSeconds numOfHosts"),
    **_each(TEXTS, "resources labels rayStartParams"),
)

CLUSTER_SPEC = _object(
    ["headGroupSpec"],
    authOptions=_object(mode={"enum": ["disabled", "token"]}),
    headServiceAnnotations=TEXTS,
    headGroupSpec=HEAD,
    workerGroupSpecs={"type": "array", "items": WORKERS},
    **_each(FLAG, "suspend enableInTreeAutoscaling"),
    **_each(TEXT, "managedBy rayVersion"),
    **_each(ANY, "upgradeStrategy autoscalerOptions gcsFaultToleranceOptions"),
)

JOB_SPEC = _object(
    rayClusterSpec=CLUSTER_SPEC,
    submitterPodTemplate=POD_TEMPLATE,
    submitterConfig=_object(backoffLimit=COUNT),
    deletionStrategy=ANY,
    submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]},
    **_each(COUNT, "activeDeadlineSeconds backoffLimit preRunningDeadlineSeconds ttlSecondsAfterFinished"),
    **_each(TEXT, "managedBy entrypoint runtimeEnvYAML jobId entrypointResources"),
    **_each(TEXTS, "metadata clusterSelector"),
    **_each({"type": "number"}, "entrypointNumCpus entrypointNumGpus"),
    **_each(FLAG, "shutdownAfterJobFinishes suspend"),
)


def _resource(kind, spec):
    constants = {"apiVersion": {"const": "ray.io/v1"}, "kind": {"const": kind}}
    return _object(["apiVersion", "kind", "metadata", "spec"], **constants, metadata=ANY, spec=spec)


SCHEMAS = {"RayCluster": _resource("RayCluster", CLUSTER_SPEC), "RayJob": _resource("RayJob", JOB_SPEC)}
