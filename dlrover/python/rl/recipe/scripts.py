# SPDX-License-Identifier: Apache-2.0
"""Existing programs as roles of a job: a command, or a function of the job's ``config``, without a base class.

::

    trainer: {device_type: CPU, device_per_node: 2}
    workload:
      train: {command: "torch_script.py's command line", num: 2}     # or function: "my_module:main"

The worker starts the program below a warden, which ends it with the worker. Output goes to the worker's output and to
``job_dir/logs/ROLE-rank.log``, and counts as progress. The program has the variables that ``torchrun`` sets. The job
ends when every program has ended with exit code 0; after another exit code the workers of the role are replaced and
start it again, within the role's limits. With ``ray: true`` each program has a private Ray cluster.
"""

import os
import pickle
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import IO, Any

from dlrover.python.rl.common.errors import ClassNotFound, ConfigError, InvocationTimeout, ScriptFailed, user_traceback
from dlrover.python.rl.common.extensions import load_object
from dlrover.python.rl.common.names import RLRoleType
from dlrover.python.rl.environment.sandbox.child_process import interpreter_command, stand_guard
from dlrover.python.rl.recipe.program_ray import beside_ray
from dlrover.python.rl.trainer.trainer import BaseTrainer
from dlrover.python.rl.trainer.workload import BaseWorkload, trainer_invocation

_CHUNK_BYTES, _END_BYTES = 1 << 16, 400
_EXIT_S, _POLL_S = 5.0, 0.5


class ScriptTrainer(BaseTrainer):
    """Runs the programs of all roles at the same time, and ends with the last one or at the first failure."""

    @classmethod
    def check_config(cls, config: Any, roles: Mapping[RLRoleType, int]) -> Iterable[ConfigError]:
        scripts = config.get("scripts") or {}
        missing = [role.lower() for role in roles if role.lower() not in scripts]
        return [ConfigError(f"workload.{role}", "has neither a command nor a function") for role in missing]

    def init(self) -> None:
        pass

    def fit(self) -> None:
        for _ in self.steps(1):  # programs that are lost in a step run again
            running = [getattr(self, name).run(str(self.job_dir / "logs")) for name in self.get_role_groups()]
            while running:
                results = running.pop(0)
                try:
                    results.result(_POLL_S)  # raises the failure of a role
                except InvocationTimeout:
                    running.append(results)


class Script(BaseWorkload):
    """Runs one program; ``config.scripts.<role>`` has its ``command`` (text for a shell, or a list) or ``function``."""

    needs_own_process = True  # its ranks may meet in collectives, so they start again together

    @classmethod
    def check_config(cls, config: Any) -> Iterable[ConfigError]:
        for role, script in (config.get("scripts") or {}).items():
            if "function" in script:
                try:
                    load_object(script["function"])
                except ClassNotFound as error:
                    yield ConfigError(f"workload.{role}.function", str(error))

    @trainer_invocation(blocking=False)
    def run(self, logs: str) -> None:
        """Run the program to its end. Raises ScriptFailed."""
        script, member = self.config.scripts[self.role.lower()], self._member.to_env()
        if "function" in script:
            program = interpreter_command(run_function, script["function"])
        else:
            command = script["command"]
            command = ["/bin/sh", "-c", command] if isinstance(command, str) else command
            program = interpreter_command(run_command, *command)  # its children end with it or its parent
        if "ray" not in script:
            return self._run(program, torchrun_environment(os.environ, member, self.devices), logs)
        # Its cluster has the devices of this worker alone.
        own = {"CUDA_VISIBLE_DEVICES": "", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        environment = torchrun_environment(os.environ, {**member, **own}, self.devices)
        with beside_ray(program, script["ray"], f"{self.role.lower()}-{self.rank}") as command:
            return self._run(command, environment, logs)

    def _run(self, program: Sequence[str], environment: Mapping[str, str], logs: str) -> None:
        script = self.config.scripts[self.role.lower()]
        log = Path(logs) / f"{self.role}-{self.rank}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab", buffering=0) as file:
            process = subprocess.Popen(
                program,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, **environment},
            )
            assert process.stdin and process.stdout and process.stderr, "all are pipes"
            ends = [bytearray(), bytearray()]
            streams = (process.stdout, sys.stdout.buffer), (process.stderr, sys.stderr.buffer)
            copies = [
                Thread(target=_copy, args=(source, (file, shown), self.report_progress, end), daemon=True)
                for (source, shown), end in zip(streams, ends, strict=True)
            ]
            for copy in copies:
                copy.start()
            with suppress(BrokenPipeError), process.stdin:  # it has ended already, and its exit code says why
                process.stdin.write(pickle.dumps(self.config) if "function" in script else b"")
            try:
                code = process.wait()  # waits: for the program; ``hang_after_s`` counts from its last output
            except BaseException:
                process.terminate()  # the warden ends all below
                raise
            for copy in copies:
                copy.join(_EXIT_S)
        if code:
            lines = [line for end in ends for line in end.decode(errors="replace").splitlines() if line.strip()]
            outcome = f"ended by signal {-code}" if code < 0 else f"exit code {code}"
            raise ScriptFailed(f"{outcome}: {lines[-1].strip() if lines else 'it wrote nothing'} ({log})")


def run_command(*command: str) -> None:
    stand_guard()
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{shlex.join(command)}: {error.strerror}")


def run_function(place: str) -> None:
    stand_guard()
    try:
        config = pickle.load(sys.stdin.buffer)  # noqa: TID251 -- in the child: the config that its parent sends
        del config["scripts"]
        load_object(place)(config)
    except Exception as error:  # noqa: BLE001 -- the user's code may raise anything: its traceback is shown
        text, trace = f"{type(error).__name__}: {error}", user_traceback(error).rstrip()
        sys.exit(trace if text in trace else f"{text}\n{trace}".rstrip())


def torchrun_environment(
    outer: Mapping[str, str], member: Mapping[str, str], devices: Sequence[int]
) -> Mapping[str, str]:
    """Return the variables that ``torchrun`` sets for a process. ``PATH`` has this Python's environment, even if it is
    not activated; with one device per rank, ``LOCAL_RANK`` is its number among the visible ones."""
    environment = {**member, "TORCHELASTIC_RESTART_COUNT": member["RESTART_COUNT"], "PYTHONUNBUFFERED": "1"}
    folders, own_folder = outer.get("PATH", os.defpath).split(os.pathsep), str(Path(sys.executable).parent)
    environment["PATH"] = os.pathsep.join(folders if own_folder in folders else [own_folder, *folders])
    if devices:
        visible = [name for name in outer.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        own = [visible[number] if number < len(visible) else str(number) for number in devices]
        if len(own) == 1:
            rank = int(member["LOCAL_RANK"])
            before = [name for name in visible or map(str, range(rank + 1)) if name != own[0]][:rank]
            own = [*before, *own]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(own)
    return environment


def _copy(source: Any, targets: Sequence[IO[bytes]], progressed: Callable[[], None], end: bytearray) -> None:
    with source:
        for chunk in iter(lambda: source.read1(_CHUNK_BYTES), b""):
            progressed()
            end[:] = (end + chunk)[-_END_BYTES:]
            for target in targets:
                _append(target, chunk)


def _append(target: IO[bytes], chunk: bytes) -> None:
    with suppress(OSError, ValueError):  # a full disk costs lines of a log, not the program
        target.write(chunk)
        target.flush()
