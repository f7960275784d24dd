# SPDX-License-Identifier: Apache-2.0
"""Tokens: made once, private, compared as digests; roles and their rights; failures of an address."""

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from dlrover.python.rl.common.errors import AccessDenied, CallError
from dlrover.python.rl.common.private_files import create_private, read_token
from dlrover.python.rl.service import auth
from dlrover.python.rl.service.auth import AccessRole, TokenFile, add_token, prepare, remove_tokens
from dlrover.python.rl.service.server import FailureLimit
from tests.support.manual_clock import ManualClock


@pytest.fixture
def folder(tmp_path):
    prepare(tmp_path / "state")
    return tmp_path / "state"


def test_prepare_makes_one_private_token_of_256_bits(folder):
    token, table = read_token(folder / "token"), (folder / "tokens.json").read_bytes()
    assert len(token) * 6 >= 256
    assert token.encode() not in table
    modes = {path.name: path.stat().st_mode & 0o777 for path in (folder, *folder.iterdir())}
    assert modes == {"state": 0o700, "token": 0o600, "tokens.json": 0o600}
    assert TokenFile(folder).caller(token) == auth.Caller("admin", AccessRole.ADMIN)
    prepare(folder)
    assert (folder / "tokens.json").read_bytes() == table


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_read_token_refuses_links_and_files_for_others(folder, mode):
    (folder / "link").symlink_to("token")
    with pytest.raises(CallError):
        read_token(folder / "link")
    (folder / "token").chmod(mode)
    with pytest.raises(CallError, match="must be a file that only you can read: chmod 600"):
        read_token(folder / "token")


def text(content):
    return lambda table: table.write_text(content)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda table: table.unlink(), None),
        (lambda table: table.chmod(0o644), "chmod 600"),
        (lambda table: table.chmod(0o604), "chmod 600"),
        (text(""), "cannot be read"),
        (text("{}"), "cannot be read"),
        (text('{"tokens": 3}'), "cannot be read"),
        (text('{"tokens": [{"name": "a"}]}'), "cannot be read"),
        (text("\0"), "cannot be read"),
    ],
)
def test_spoilt_table_gives_no_access_until_it_is_restored(folder, spoil, message):
    tokens, token, table = TokenFile(folder), read_token(folder / "token"), folder / "tokens.json"
    content = table.read_bytes()
    assert tokens.caller(token).name == "admin"
    spoil(table)
    for reader in (tokens, TokenFile(folder)):
        with pytest.raises(AccessDenied):
            reader.caller(token)
        assert reader.entries() == []
    if message:
        with pytest.raises(CallError, match=message):
            prepare(folder)
    table.unlink(missing_ok=True)
    table.touch(0o600)
    table.write_bytes(content)
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


def test_role_includes_the_rights_below_it():
    def allows(role, needed):
        with suppress(AccessDenied):
            auth.Caller("x", role).check(needed)
            return True

    table = {role.value: [needed.value for needed in AccessRole if allows(role, needed)] for role in AccessRole}
    assert table == {"read": ["read"], "submit": ["read", "submit"], "admin": ["read", "submit", "admin"]}


# -- several writers, and a crash -------------------------------------------------------------------------------------


def test_concurrent_changes_of_tokens_are_all_kept(folder):
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
def test_killed_first_start_is_repeated(tmp_path, monkeypatch, written):
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


@pytest.mark.parametrize("mode", [0o755, 0o740, 0o710, 0o720, 0o704])
def test_prepare_refuses_a_folder_for_others(folder, mode):
    folder.chmod(mode)
    with pytest.raises(CallError, match="can be read by others: chmod 700"):
        prepare(folder)


# -- failures of an address -------------------------------------------------------------------------------------------


def test_address_fails_ten_times_then_once_in_a_second():
    clock = ManualClock()
    limit = FailureLimit(now_s=clock)
    assert [limit.take("a") for _ in range(12)] == [True] * 10 + [False] * 2
    clock.advance(0.9)
    assert not limit.take("a")
    clock.advance(0.2)  # refusals cost nothing
    assert limit.take("a") and not limit.take("a")
    clock.advance(3600)
    assert [limit.take("a") for _ in range(12)] == [True] * 10 + [False] * 2


def test_many_addresses_take_no_more_memory_than_some():
    limit = FailureLimit(burst=1, most=3, now_s=ManualClock())
    for number in range(100):
        assert limit.take(f"address-{number}")
        limit.take("steady")
    assert len(limit._left) == 3
    assert not limit.take("steady")  # one that still fails is not forgotten


def test_address_with_the_oldest_failure_is_forgotten():
    limit = FailureLimit(burst=1, most=2, now_s=ManualClock())
    assert [limit.take(address) for address in "abac"] == [True, True, False, True]
    assert not limit.take("a") and limit.take("b")
