# SPDX-License-Identifier: Apache-2.0
"""Paths that try to leave a folder, or to be more than a path."""

from itertools import product

UPS = [
    "../", "..\\", "%2e%2e/", "..%2f", "%252e%252e%252f", "..%c0%af", "\u2025/", "..\u2215", "\uff0e\uff0e/", "....//",
    "..;/",
]  # fmt: skip
BEFORE = ["", "/", "./", "model/", "~/", "C:\\", "file://", "\\\\host\\share\\", " "]
TARGETS = ["outside", "etc/passwd"]
PATHS = [
    "", ".", "..", "...", "/", "//", "~", "~root", "*", "%00", "a\0b", "\0", "outside\0", "../outside\0.log", "a\nb",
    "\r\n", "\x1b[2J", "\u202eedoc", "a//b", "a/./b", "a/../b", "a/", "/dev/null", "/dev/zero", "/proc/self/environ",
    "CON", "NUL", "nul.txt", "COM1", "aux", "$HOME", "${HOME}", "$(id)", "`id`", "-rf", "--help", "outside.",
    "outside...", "outside ", "/outside", "/etc/passwd", "x" * 256, "x" * 5000, "../" * 1000 + "etc/passwd",
    "a/" * 2000, "\u0130" * 300, "..\u200b/outside", ".\u200d./outside",
    *(before + up * depth + target for before, up, depth, target in product(BEFORE, UPS, (1, 9), TARGETS)),
]  # fmt: skip
