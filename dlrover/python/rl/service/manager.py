# SPDX-License-Identifier: Apache-2.0
"""The jobs of the service: operations are decided one after another, saved in groups, and answered once they are
saved."""
