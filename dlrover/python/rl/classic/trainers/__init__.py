# SPDX-License-Identifier: Apache-2.0
"""RLFusion's places of the trainers."""
