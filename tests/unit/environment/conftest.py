# SPDX-License-Identifier: Apache-2.0
"""Tests of this folder may be coroutine functions."""

from tests.support.async_tests import pytest_pyfunc_call  # noqa: F401
