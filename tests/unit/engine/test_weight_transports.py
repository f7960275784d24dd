# SPDX-License-Identifier: Apache-2.0
"""The choice of a weight transport in a job's config."""

import inspect
from dataclasses import replace

import pytest
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.engine.weight_sync import cuda_ipc
from dlrover.python.rl.engine.weight_sync.base import SyncSettings
from dlrover.python.rl.engine.weight_sync.pull import PullTransport
from dlrover.python.rl.engine.weight_sync.transports import (
    check_collocation,
    make_transport,
    prepare_folder,
    validate_transport,
)


class OwnTransport(PullTransport):
    waits_for_receivers = True


OWN = f"{__name__}:OwnTransport"
OPTIONS = "config.engine.weight_sync_options"


@pytest.mark.parametrize(
    ("name", "options", "device", "expected"),
    [
        ("auto", {}, "cpu", []),
        ("pull", {"timeout_s": 3.0}, "cuda", []),
        ("disk", {"folder": "weights/new"}, "cpu", []),
        ("broadcast", {}, "cpu", []),
        ("cuda_ipc", {}, "cuda", []),
        (
            "broadcast",
            {"receivers": 2},
            "cpu",
            [f"{OPTIONS}.receivers: unknown key 'receivers'; known: "],
        ),
        (OWN, {"folder": f"{__file__}/any"}, "cpu", []),
        (OWN, {"receivers": 2}, "cpu", [f"{OPTIONS}.receivers: unknown key"]),
        ("auto", {"folder": None}, "cpu", []),
        ("brodcast", {}, "cpu", ["config.engine.weight_sync: no weight transport is called 'brodcast'; did you mean"]),
        ("nowhere:Transport", {}, "cpu", ["config.engine.weight_sync: module 'nowhere' cannot be imported"]),
        ("disk", {}, "cpu", ["config.engine.weight_sync_options.folder: 'disk' needs a folder"]),
        ("disk", {"folder": ""}, "cpu", [f"{OPTIONS}.folder: is empty: 'disk' needs a folder that all workers see"]),
        ("disk", {"foldr": "x"}, "cpu", [f"{OPTIONS}.foldr: unknown key", f"{OPTIONS}.folder: 'disk' needs a folder"]),
        (
            "brodcast",
            {"foldr": "x", "timeout_s": 0},
            "cpu",
            [
                f"{OPTIONS}.timeout_s: input",
                f"{OPTIONS}.foldr: unknown",
                "config.engine.weight_sync: no weight transport",
            ],
        ),
        (
            "pull",
            {"buckets": 2, "folder": 3},
            "cpu",
            [f"{OPTIONS}.folder: input", f"{OPTIONS}.buckets: unknown key"],
        ),
        ("auto", {"folder": "x"}, "cpu", [f"{OPTIONS}.folder: is an option of 'disk', not of 'auto'"]),
        ("pull", {"folder": "x"}, "cpu", [f"{OPTIONS}.folder: is an option of 'disk', not of 'pull'"]),
        ("broadcast", {"folder": "x"}, "cpu", [f"{OPTIONS}.folder: is an option of 'disk', not of 'broadcast'"]),
        ("cuda_ipc", {"folder": "x"}, "cuda", [f"{OPTIONS}.folder: is an option of 'disk', not of 'cuda_ipc'"]),
        ("cuda_ipc", {}, "cpu", ["config.engine.weight_sync: 'cuda_ipc' needs engine.device cuda"]),
        ("broadcast", {}, "cuda:0", ["config.engine.weight_sync: 'broadcast' needs a device for each worker"]),
    ],
)
def test_a_choice_that_cannot_work_is_refused_with_its_key(name, options, device, expected):
    errors = [str(error) for error in validate_transport(name, options, device)]
    assert len(errors) == len(expected)
    assert all(error.startswith(start) for error, start in zip(errors, expected, strict=True)), errors


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("below", ["", "weights/of/run"])
def test_a_folder_below_a_file_is_refused_on_every_device(tmp_path, device, below):
    (tmp_path / "file").touch()
    errors = validate_transport("disk", {"folder": str(tmp_path / "file" / below)}, device)
    assert [str(error) for error in errors] == [f"{OPTIONS}.folder: {tmp_path / 'file'} is a file, not a folder"]


def test_a_folder_that_cannot_be_written_to_is_refused_unless_the_job_may_be_for_other_machines(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)
    errors = validate_transport("disk", {"folder": str(tmp_path)}, "cpu")
    assert [str(error) for error in errors] == [f"{OPTIONS}.folder: {tmp_path} cannot be written to"]
    assert validate_transport("disk", {"folder": str(tmp_path)}, "cuda") == []
    assert validate_transport("disk", {"folder": str(tmp_path / "of/a/node")}, "cpu") == []


def test_a_folder_is_made_before_the_first_step_and_an_error_of_it_is_not_repeated(tmp_path):
    prepare_folder("disk", {"folder": str(tmp_path / "of/a/run")})
    assert list((tmp_path / "of/a/run").iterdir()) == []
    prepare_folder("pull", {})
    for folder in ("/proc/nope", "/proc"):
        with pytest.raises(EngineError) as caught:
            prepare_folder("disk", {"folder": folder})
        where = "engine.weight_sync_options.folder"
        assert str(caught.value) == f"{where}: weights cannot be written to {folder}: No such file or directory"
        assert not caught.value.retryable


@pytest.mark.parametrize(
    ("name", "device", "is_collocated", "is_refused"),
    [
        ("broadcast", "cuda:0", True, True),
        ("broadcast", "cuda:0", False, False),
        ("broadcast", "cpu", True, False),
        ("cuda_ipc", "cuda:0", False, True),
        ("cuda_ipc", "cuda:0", True, False),
        ("auto", "cuda:0", True, False),
    ],
)
def test_collocated_roles_restrict_the_choice(name, device, is_collocated, is_refused):
    if not is_refused:
        check_collocation(name, device, is_collocated)
        return
    with pytest.raises(EngineError, match=f"engine.weight_sync '{name}' needs actor and rollout"):
        check_collocation(name, device, is_collocated)


def test_rollouts_of_one_process_cannot_be_waited_for_at_once():
    with pytest.raises(EngineError, match="sends to 2 rollouts at once, .* leave out --local, or use 'pull'"):
        check_collocation("broadcast", "cpu", False, in_one_process=True, receivers=2)
    check_collocation("broadcast", "cpu", False, in_one_process=True, receivers=1)
    check_collocation("broadcast", "cpu", False, receivers=2)
    check_collocation("pull", "cpu", False, in_one_process=True, receivers=2)
    check_collocation("cuda_ipc", "cuda:0", True, in_one_process=True, receivers=2)


def test_a_transport_is_made_with_the_options_and_a_longer_timeout_where_it_waits(tmp_path):
    settings = SyncSettings("ACTOR[0]", timeout_s=5.0, channel="ACTOR")
    options = {"folder": str(tmp_path), "bucket_bytes": 4096}
    assert make_transport("auto", {}, settings).settings == settings
    made = make_transport(OWN, options, replace(settings, receivers=3)).settings
    assert (made.folder, made.bucket_bytes, made.receivers, made.timeout_s) == (tmp_path, 4096, 3, 60.0)
    assert make_transport("disk", options, settings).settings.timeout_s == 5.0


def test_a_receiver_opens_memory_by_its_own_number_of_the_device():
    handle = (lambda *arguments: arguments, tuple("abcdef") + (0,) + tuple("hijklmno"))
    opened = cuda_ipc._open_memory(handle, "", ticket=None, device="cuda:3")
    assert opened == (*"abcdef", 3, *"hijklmno")
    place = list(inspect.signature(rebuild_cuda_tensor).parameters).index("storage_device")
    assert opened[place] == 3
