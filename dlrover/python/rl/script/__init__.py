# SPDX-License-Identifier: Apache-2.0
"""Training from a script or a notebook: one call for each recipe."""
