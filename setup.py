# SPDX-License-Identifier: Apache-2.0
"""Run setuptools for tools that call this file; the package is described in ``pyproject.toml``."""

from setuptools import setup

setup()
