# SPDX-License-Identifier: Apache-2.0
"""A job over three hosts with networks of their own ends in the same bits when they are cut off, die and join."""

import pytest

from tests.chaos import hosts

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(2400)]


@pytest.mark.skipif(
    not hosts.has_namespaces(),
    reason="no network namespaces can be made here; python -m tests.chaos.run has Ray nodes on one address",
)
def test_a_job_over_three_hosts_keeps_its_bits_when_one_is_cut_off_one_dies_and_one_joins(tmp_path):
    assert hosts.main(["--out", str(tmp_path)]) == 0
