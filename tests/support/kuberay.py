# SPDX-License-Identifier: Apache-2.0
"""The fields of KubeRay's resources, as its API reference (ray.io/v1, KubeRay 1.5) lists them, as JSON schemas.

The published definitions repeat every field of a pod; here Kubernetes' own schema judges the pods.
"""

TEXT, FLAG, COUNT = {"type": "string"}, {"type": "boolean"}, {"type": "integer", "minimum": 0}
TEXTS = {"type": "object", "additionalProperties": TEXT}
ANY = {"type": "object"}


def _object(required=(), **properties):
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


POD_TEMPLATE = _object(["spec"], metadata=ANY, spec=ANY)

HEAD = _object(
    ["template"],
    template=POD_TEMPLATE,
    headService=ANY,
    enableIngress=FLAG,
    resources=TEXTS,
    labels=TEXTS,
    rayStartParams=TEXTS,
    serviceType={"enum": ["ClusterIP", "NodePort", "LoadBalancer", "ExternalName"]},
)

WORKERS = _object(
    ["groupName", "template"],
    groupName=TEXT,
    suspend=FLAG,
    replicas=COUNT,
    minReplicas=COUNT,
    maxReplicas=COUNT,
    idleTimeoutSeconds=COUNT,
    numOfHosts=COUNT,
    resources=TEXTS,
    labels=TEXTS,
    rayStartParams=TEXTS,
    template=POD_TEMPLATE,
    scaleStrategy=_object(workersToDelete={"type": "array", "items": TEXT}),
)

CLUSTER_SPEC = _object(
    ["headGroupSpec"],
    upgradeStrategy=ANY,
    authOptions=_object(mode={"enum": ["disabled", "token"]}),
    suspend=FLAG,
    managedBy=TEXT,
    autoscalerOptions=ANY,
    headServiceAnnotations=TEXTS,
    enableInTreeAutoscaling=FLAG,
    gcsFaultToleranceOptions=ANY,
    headGroupSpec=HEAD,
    rayVersion=TEXT,
    workerGroupSpecs={"type": "array", "items": WORKERS},
)

JOB_SPEC = _object(
    activeDeadlineSeconds=COUNT,
    backoffLimit=COUNT,
    preRunningDeadlineSeconds=COUNT,
    rayClusterSpec=CLUSTER_SPEC,
    submitterPodTemplate=POD_TEMPLATE,
    metadata=TEXTS,
    clusterSelector=TEXTS,
    submitterConfig=_object(backoffLimit=COUNT),
    managedBy=TEXT,
    deletionStrategy=ANY,
    entrypoint=TEXT,
    runtimeEnvYAML=TEXT,
    jobId=TEXT,
    submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]},
    entrypointResources=TEXT,
    entrypointNumCpus={"type": "number"},
    entrypointNumGpus={"type": "number"},
    ttlSecondsAfterFinished=COUNT,
    shutdownAfterJobFinishes=FLAG,
    suspend=FLAG,
)


def _resource(kind, spec):
    return _object(
        ["apiVersion", "kind", "metadata", "spec"],
        apiVersion={"const": "ray.io/v1"},
        kind={"const": kind},
        metadata=ANY,
        spec=spec,
    )


SCHEMAS = {"RayCluster": _resource("RayCluster", CLUSTER_SPEC), "RayJob": _resource("RayJob", JOB_SPEC)}
