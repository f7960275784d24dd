# SPDX-License-Identifier: Apache-2.0
"""Print the lowest versions that ``pyproject.toml`` allows, of the core and its tests, for ``make test-lower``.

``python requirements/lower.py torch==2.13.0`` replaces the version of torch.
"""

import re
import sys
import tomllib
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).resolve().parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def lowest(requirements: list[str]) -> dict[str, str]:
    """Map each package to its lowest version; an entry ``dlrover-rl[extra]`` stands for the packages of that extra."""
    versions: dict[str, str] = {}
    for requirement in requirements:
        if extras := re.fullmatch(r"dlrover-rl\[(.+)\]", requirement):
            for extra in extras[1].split(","):
                versions |= lowest(PROJECT["optional-dependencies"][extra])
        elif bound := re.match(r"([\w.-]+)(?:\[.*\])?>=([\w.]+)", requirement):
            versions[bound[1]] = bound[2]
        else:
            raise SystemExit(f"pyproject.toml: '{requirement}' has no lower bound, such as >=1.0")
    return versions


def main(replacements: list[str]) -> None:
    versions = lowest([*PROJECT["dependencies"], "dlrover-rl[test]"])
    for replacement in replacements:
        name, equals, version = replacement.partition("==")
        if not equals:
            raise SystemExit(f"'{replacement}' replaces no version: write name==version")
        versions[name] = version
    sys.stdout.writelines(f"{name}=={version}\n" for name, version in versions.items())


if __name__ == "__main__":
    main(sys.argv[1:])
