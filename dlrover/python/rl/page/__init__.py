# SPDX-License-Identifier: Apache-2.0
"""The page of runs: data from their folders, a server of JSON and a script that draws it, and one-file exports."""
