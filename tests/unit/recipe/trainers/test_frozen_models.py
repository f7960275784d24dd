# SPDX-License-Identifier: Apache-2.0
"""Models that a run does not train stay those that it was begun with."""

import shutil

import pytest
from safetensors.torch import load_file, save_file

from dlrover.python.rl.common.errors import DataError
from dlrover.python.rl.common.names import RLRoleType
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from dlrover.python.rl.recipe.memory.arithmetic import ModelUse
from dlrover.python.rl.recipe.trainers.recipe_trainer import FrozenModels


def models(**paths):
    uses = {RLRoleType(role.upper()): ModelUse("frozen", str(path)) for role, path in paths.items()}
    uses[RLRoleType.ACTOR] = ModelUse("trained", "anything")
    return FrozenModels(uses)


def test_other_weights_are_refused_and_another_place_is_not(tmp_path):
    first = write_tiny_model(tmp_path / "first", hidden=32, layers=1)
    state = models(reference=first, reward=first).state_dict()
    moved, other = shutil.copytree(first, tmp_path / "moved"), shutil.copytree(first, tmp_path / "other")
    models(reference=moved, reward=first).load_state_dict(state)
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"][0] += 1.0
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(DataError) as caught:
        models(reference=other, reward=moved).load_state_dict(state)
    (error,) = caught.value.errors
    assert error.what == f"the weights of '{other}', the reference, have changed since the run began"


def test_the_files_are_read_once(tmp_path):
    made = models(reference=write_tiny_model(tmp_path / "model", hidden=32, layers=1))
    state = made.state_dict()
    shutil.rmtree(tmp_path / "model")
    assert made.state_dict() == state != {"REFERENCE": ""}


def test_what_cannot_be_compared_is_taken(tmp_path):
    here = write_tiny_model(tmp_path / "here", hidden=32, layers=1)
    of_hub = models(reference="owner/name")
    assert of_hub.state_dict() == {"REFERENCE": ""}
    models(reference=here).load_state_dict(of_hub.state_dict())
    known = models(reference=here).state_dict()
    of_hub.load_state_dict(known)
    assert of_hub.state_dict() == known, "it stays known, for when the files are here again"
    models(reference=here).load_state_dict({})
    models().load_state_dict(models(reference=here).state_dict())
