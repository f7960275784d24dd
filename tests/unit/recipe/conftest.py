# SPDX-License-Identifier: Apache-2.0
"""pytest puts the folder of a conftest on the path: the helpers here serve the tests of the folders below, too."""
