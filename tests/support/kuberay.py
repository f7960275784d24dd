# SPDX-License-Identifier: Apache-2.0
"""The published definitions of KubeRay's and Kueue's resources, made strict: an unknown field is a fault.

``tests/fixtures/crds`` has each with its source. Templates of pods are any object there: Kubernetes' own schema judges
them.
"""

import json
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "fixtures/crds"
_FREE = "x-kubernetes-preserve-unknown-fields"


def _strict(schema):
    if isinstance(schema, list):
        return [_strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _strict(value) for name, value in schema.items() if not name.startswith("x-kubernetes-")}
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    if "properties" in schema and not schema.get(_FREE):
        closed.setdefault("additionalProperties", False)
    return closed


def _resource(definition, version):
    schema = _strict(definition["versions"][version])
    schema["required"] = sorted({*schema.get("required", ()), "apiVersion", "kind", "metadata", "spec"})
    schema["properties"]["metadata"] = {"type": "object", "required": ["name"]}
    return schema


def load_schemas():
    """Return the schema of each resource by its API version and kind."""
    schemas = {}
    for file in FOLDER.glob("*.json"):
        definition = json.loads(file.read_text())
        for version in definition["versions"]:
            schemas[f"{definition['group']}/{version}", definition["kind"]] = _resource(definition, version)
    return schemas


SCHEMAS = load_schemas()
