# SPDX-License-Identifier: Apache-2.0
"""Check the subject of a commit message: ``python3 .ci/check_subject.py FILE``, as git's commit-msg hook calls it."""

import sys
from pathlib import Path

LIMIT = 72
WRITTEN_BY_GIT = (
    "Merge branch ",
    "Merge remote-tracking branch ",
    "Merge pull request ",
    "Merge tag ",
    'Revert "',
    "fixup! ",
    "squash! ",
    "amend! ",
)


def errors_of(message: str) -> list[str]:
    lines = (line.strip() for line in message.splitlines() if not line.startswith("#"))
    subject = next(filter(None, lines), "")
    if subject.startswith(WRITTEN_BY_GIT):
        return []
    errors = []
    if len(subject) > LIMIT:
        errors.append(f"the subject has {len(subject)} characters, at most {LIMIT} are allowed")
    if subject.endswith("."):
        errors.append("the subject ends with a full stop")
    return errors


if __name__ == "__main__":
    errors = errors_of(Path(sys.argv[1]).read_text(encoding="utf-8"))
    sys.stderr.writelines(f"commit message: {error}\n" for error in errors)
    sys.exit(bool(errors))
