# SPDX-License-Identifier: Apache-2.0
"""The verbs for looking at runs, from the files in their folders."""

VERBS = ()
