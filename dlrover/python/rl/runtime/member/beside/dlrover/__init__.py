# SPDX-License-Identifier: Apache-2.0
"""The package ``dlrover`` for interpreters of other environments: their path gets the folder above this one, which has
nothing else, rather than all packages of the job's environment."""

from pathlib import Path
from pkgutil import extend_path

__path__ = extend_path([str(Path(__file__).parents[6])], __name__)
