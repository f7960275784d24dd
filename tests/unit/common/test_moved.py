# SPDX-License-Identifier: Apache-2.0
"""Names that users of upstream DLRover and RLite type."""

import importlib

import pytest


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("driver.main", "dlrover-rl submit"),
        ("api.api", "from dlrover.rl import RLJobBuilder, RLJob"),
        ("common.enums", "from dlrover.rl import RLRoleType"),
        ("common.roles", "from dlrover.rl import RLRoleType"),
        ("trainer.example.openrlhf", "examples/openrlhf and examples/verl"),
    ],
)
def test_a_module_of_upstream_names_its_new_place(module, said):
    with pytest.raises(ModuleNotFoundError, match=said):
        importlib.import_module(f"dlrover.python.rl.{module}")


def test_a_module_that_never_was_is_just_not_found():
    with pytest.raises(ModuleNotFoundError, match="^No module named"):
        importlib.import_module("dlrover.python.rl.common.nowhere")


@pytest.mark.parametrize(
    ("module", "name", "said"),
    [
        ("dlrover.rl", "RliteTrainEngine", "use 'TrainEngine'"),
        ("dlrover.rl", "RliteInferenceEngine", "use 'InferenceEngine'"),
        ("dlrover.rl.nn", "HuggingFaceFsdp2TrainModule", "use 'TrainModule'"),
        ("dlrover.rl", "Nothing", "has no attribute 'Nothing'$"),
    ],
)
def test_a_name_of_rlite_names_its_new_one(module, name, said):
    with pytest.raises((AttributeError, ImportError), match=said):
        getattr(importlib.import_module(module), name)


def test_an_import_of_a_name_of_rlite_names_its_new_one():
    with pytest.raises(ImportError, match="use 'TrainEngine'"):
        from dlrover.rl import RliteTrainEngine  # noqa: F401


def test_both_homes_of_the_guide_have_its_names():
    from dlrover.python.rl.trainer import trainer, workload

    assert trainer.BaseWorkload is workload.BaseWorkload
    assert trainer.trainer_invocation is workload.trainer_invocation
