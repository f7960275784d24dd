# SPDX-License-Identifier: Apache-2.0
"""Tokens: made once, private, compared as digests; roles and what they may do."""

import ast
import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest

from dlrover.python.rl.common.errors import AccessDenied, CallError
from dlrover.python.rl.common.private_files import create_private, read_token
from dlrover.python.rl.service import auth
from dlrover.python.rl.service.auth import AccessRole, TokenFile, add_token, prepare, remove_tokens


@pytest.fixture
def folder(tmp_path):
    prepare(tmp_path / "state")
    return tmp_path / "state"


def test_the_first_start_makes_a_private_token_of_256_bits(folder):
    token = read_token(folder / "token")
    assert len(token) * 6 >= 256
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()} == {
        "token": 0o600,
        "tokens.json": 0o600,
    }
    assert TokenFile(folder).caller(token) == auth.Caller("admin", AccessRole.ADMIN)


def test_the_second_start_keeps_it(folder):
    before = (folder / "tokens.json").read_bytes()
    prepare(folder)
    assert (folder / "tokens.json").read_bytes() == before


def test_the_token_itself_is_not_in_the_table_of_tokens(folder):
    assert read_token(folder / "token") not in (folder / "tokens.json").read_text()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_files_that_others_can_read_are_refused(folder, mode):
    token = read_token(folder / "token")
    (folder / "token").chmod(mode)
    with pytest.raises(CallError, match="must be a file that only you can read: chmod 600"):
        read_token(folder / "token")
    (folder / "tokens.json").chmod(mode)
    with pytest.raises(CallError, match="chmod 600"):
        prepare(folder)
    with pytest.raises(AccessDenied):  # also while the service runs
        TokenFile(folder).caller(token)


def test_a_folder_that_others_can_read_is_refused(folder):
    folder.chmod(0o755)
    with pytest.raises(CallError, match="chmod 700"):
        prepare(folder)


def test_a_link_is_no_token_file(folder, tmp_path):
    (tmp_path / "link").symlink_to(folder / "token")
    with pytest.raises(CallError):
        read_token(tmp_path / "link")


@pytest.mark.parametrize("content", ["", "{}", '{"tokens": 3}', '{"tokens": [{"name": "a"}]}', "\0"])
def test_without_a_readable_table_nobody_has_access(folder, content):
    token = read_token(folder / "token")
    (folder / "tokens.json").write_text(content)
    with pytest.raises(AccessDenied):
        TokenFile(folder).caller(token)
    with pytest.raises(CallError, match="cannot be read"):
        prepare(folder)


def test_without_the_file_nobody_has_access_and_with_it_again_everybody(folder):
    tokens, token = TokenFile(folder), read_token(folder / "token")
    text = (folder / "tokens.json").read_text()
    (folder / "tokens.json").unlink()
    with pytest.raises(AccessDenied):
        tokens.caller(token)
    (folder / "tokens.json").touch(0o600)
    (folder / "tokens.json").write_text(text)
    assert tokens.caller(token).name == "admin"


def test_two_tokens_of_a_name_are_valid_until_both_are_removed(folder):
    old = read_token(add_token(folder, "ann", AccessRole.SUBMIT, folder / "old"))
    tokens = TokenFile(folder)
    assert tokens.caller(old).name == "ann"
    new = read_token(add_token(folder, "ann", AccessRole.SUBMIT, folder / "new"))
    assert tokens.caller(old) == tokens.caller(new)
    assert remove_tokens(folder, "ann") == 2
    for token in (old, new):
        with pytest.raises(AccessDenied):
            tokens.caller(token)


def test_a_name_has_one_role_and_a_file_is_not_overwritten(folder):
    add_token(folder, "ann", AccessRole.READ, folder / "ann")
    with pytest.raises(CallError, match="'ann' has another role"):
        add_token(folder, "ann", AccessRole.ADMIN, folder / "ann2")
    with pytest.raises(CallError, match="exists already"):
        add_token(folder, "ann", AccessRole.READ, folder / "ann")
    with pytest.raises(CallError, match="is not a valid name"):
        add_token(folder, "../ann", AccessRole.READ, folder / "ann3")
    assert len(json.loads((folder / "tokens.json").read_text())["tokens"]) == 2


def test_what_each_role_may_do():
    def allows(role, needed):
        with suppress(AccessDenied):
            auth.Caller("x", role).check(needed)
            return True

    table = {role.value: [needed.value for needed in AccessRole if allows(role, needed)] for role in AccessRole}
    assert table == {"read": ["read"], "submit": ["read", "submit"], "admin": ["read", "submit", "admin"]}


def test_no_comparison_of_secrets_takes_a_time_that_depends_on_them():
    """``==`` and ``in`` end at the first difference."""
    tree = ast.parse(Path(auth.__file__).read_text())
    secret = {"token", "digest", "sha256"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            names = {part.id if isinstance(part, ast.Name) else part.attr for part in ast.walk(node)
                     if isinstance(part, ast.Name | ast.Attribute)}  # fmt: skip
            assert not names & secret, ast.unparse(node)


# -- several writers, and a crash -------------------------------------------------------------------------------------


def test_of_tokens_that_are_added_and_removed_at_once_none_is_lost_and_none_comes_back(folder):
    def add_and_remove(number):
        for round_ in range(5):
            add_token(folder, f"kept-{number}-{round_}", AccessRole.READ, folder / f"kept-{number}-{round_}")
            add_token(folder, f"gone-{number}-{round_}", AccessRole.READ, folder / f"gone-{number}-{round_}")
            remove_tokens(folder, f"gone-{number}-{round_}")

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(add_and_remove, range(8)))
    names = {name for name, _ in TokenFile(folder).entries()}
    assert names == {"admin", *(f"kept-{number}-{round_}" for number in range(8) for round_ in range(5))}


def test_two_first_starts_at_once_make_one_token(tmp_path):
    with ThreadPoolExecutor(8) as threads:
        paths = set(threads.map(lambda _: prepare(tmp_path / "state"), range(8)))
    (path,) = paths
    assert TokenFile(tmp_path / "state").caller(read_token(path)).role is AccessRole.ADMIN
    assert len(TokenFile(tmp_path / "state").entries()) == 1


@pytest.mark.parametrize("written", [0, 1])
def test_a_first_start_that_was_killed_between_its_files_is_done_again(tmp_path, monkeypatch, written):
    class Killed(BaseException):
        """Ends the process wherever it is."""

    def killed(path, text):
        if len(list((tmp_path / "state").iterdir())) == written:
            raise Killed
        create_private(path, text)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(auth, "create_private", killed)
        prepare(tmp_path / "state")
    token = read_token(prepare(tmp_path / "state"))
    assert TokenFile(tmp_path / "state").caller(token).role is AccessRole.ADMIN


@pytest.mark.parametrize("mode", [0o740, 0o710, 0o720, 0o704])
def test_a_folder_for_more_than_its_owner_is_refused(folder, mode):
    folder.chmod(mode)
    with pytest.raises(CallError, match="can be read by others"):
        prepare(folder)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda table: table.chmod(0o644),
        lambda table: table.write_text("{"),
        lambda table: table.unlink(),
    ],
)
def test_a_table_that_is_spoilt_takes_away_all_access(folder, spoil):
    tokens, token = TokenFile(folder), read_token(folder / "token")
    assert tokens.caller(token).name == "admin"
    spoil(folder / "tokens.json")
    with pytest.raises(AccessDenied):
        tokens.caller(token)
    assert tokens.entries() == []


@pytest.mark.parametrize(
    ("role", "own", "foreign"),
    [(AccessRole.READ, False, False), (AccessRole.SUBMIT, True, False), (AccessRole.ADMIN, True, True)],
)
def test_a_role_operates_its_own_jobs_or_all(role, own, foreign):
    caller = auth.Caller("ann", role)
    for owner, is_allowed in (("ann", own), ("bob", foreign)):
        with nullcontext() if is_allowed else pytest.raises(AccessDenied, match=f"role '{role}'"):
            caller.check_owner(owner)
