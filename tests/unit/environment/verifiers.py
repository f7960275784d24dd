"""Verifiers of every bad habit, run in child processes."""

import os
import signal
import subprocess
import sys


def length(completion, answer, extra_info):
    return len(completion) + extra_info.get("bonus", 0)


def process_id(completion, answer, extra_info):
    return os.getpid()


def obedient(completion, answer, extra_info):
    """Does what the completion says."""
    if completion == "loop":
        while True:
            pass
    if completion == "raise":
        raise KeyError("no such thing")
    if completion == "exit":
        sys.exit(3)
    if completion == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if completion == "child":
        child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        with open(extra_info["path"], "w") as file:
            file.write(str(child.pid))
        child.wait()
    if completion == "heavy":
        return len({"torch", "numpy", "pytest", "transformers", "ray"} & set(sys.modules))
    return {"nan": float("nan"), "none": None, "bool": True}.get(completion, 1.0)


not_a_function = 3
