# SPDX-License-Identifier: Apache-2.0
"""Lets vLLM take its second model runner on a CPU, with Triton's interpreter (``TRITON_INTERPRET=1``): for tests, since
kernels then run in numpy. Python imports this module at its start where ``PYTHONPATH`` has its folder."""

import importlib.abc
import importlib.util
import sys


class _Driver:
    @staticmethod
    def is_active():
        return True


class _Backend:
    driver = _Driver
    compiler = None


class _Finder(importlib.abc.MetaPathFinder):
    """Replaces Triton's backends once they are imported."""

    def find_spec(self, name, path, target=None):
        if name != "triton.backends":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            module.backends = {"cpu": _Backend()}

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder())
