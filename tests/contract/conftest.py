# SPDX-License-Identifier: Apache-2.0
"""The stages of the port contract suite, imported when asked for: the suites of the engines run without Ray."""

import pytest


@pytest.fixture(scope="module", params=["local", "torchrun", pytest.param("ray", marks=pytest.mark.ray)])
def stage(request, tmp_path_factory):
    """A stage shared by tests that leave its workers as they were."""
    from tests.support.role_group_stages import LocalStage, RayStage, TorchrunStage

    if request.param == "ray":
        request.getfixturevalue("ray_session")
    kind = {"local": LocalStage, "torchrun": TorchrunStage, "ray": RayStage}[request.param]
    subject = kind(tmp_path_factory.mktemp(request.param))
    yield subject
    subject.close()
