# SPDX-License-Identifier: Apache-2.0
"""Which values are secrets, and a job without them."""

import ast
import pickle
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from dlrover.python.rl.common import log
from dlrover.python.rl.common.log import HIDDEN, hide_values, redacted, redacted_bytes
from dlrover.python.rl.config.layout import job_to_yaml
from dlrover.python.rl.config.load import load_job, load_job_text
from dlrover.python.rl.config.secrets import hidden_in, is_secret_at, seal, unseal, variables_of, without_secrets
from dlrover.python.rl.control.events import Cause, CauseKind

ROOT = Path(__file__).parents[3]

JOB = """
name: job
trainer: {module: m, class: T, device_type: CPU, device_per_node: 2}
workload:
  actor: {module: m, class: A, env: {MEMBER_TOKEN: canary-1, LEVEL: "3"}}
env: {API_KEY: canary-2, MODE: fast}
config:
  lr: 1.0e-3
  max_tokens: "512"
  tokenizer: {pad_token: "<pad>", name: here}
  judge: {api_key: canary-3, url: "https://user:canary-4@host/x", keys: [a, b]}
  copies: [{password: canary-5}]
  reference: ${env.API_KEY}
"""


@pytest.fixture
def job():
    return load_job_text(JOB, "job")


def test_sealed_job_has_no_secret_in_any_form(job):
    sealed, secrets = seal(job)
    assert {value[:6] for value in secrets.values()} == {"canary", "https:"}
    of_config = ("config.judge.api_key", "config.judge.url", "config.copies.0.password")
    assert set(secrets) == {"env.API_KEY", "workload.actor.env.MEMBER_TOKEN", *of_config}
    assert b"canary" not in pickle.dumps(sealed)
    assert "canary" not in job_to_yaml(job, hide_secrets=True)
    assert sorted(hidden_in(sealed)) == sorted({*secrets})
    assert sealed.config.tokenizer.pad_token == "<pad>" and sealed.config.max_tokens == "512"


def test_unsealed_job_is_the_job_again(job):
    sealed, secrets = seal(job)
    again = unseal(pickle.loads(pickle.dumps(sealed)), secrets)
    assert OmegaConf.to_container(again.config, resolve=True) == OmegaConf.to_container(job.config, resolve=True)
    assert again.config.reference == "canary-2"
    assert again.env == job.env and again.workloads == job.workloads
    assert not hidden_in(again)
    open_job = load_job_text(JOB.partition("env: {API")[0].replace("MEMBER_TOKEN", "MODE"), "job")
    assert seal(open_job)[1] == {} and seal(open_job)[0].config is open_job.config


SECRET_NAMES = [
    "api_key", "apikey", "password", "passwords", "passwd", "pwd", "judge_api_key", "hf_token", "token",
    "client_secret", "secrets", "github_token", "huggingface_token", "wandb_token", "openai_key", "ssh_key",
    "signing_key", "authorization", "Authorization", "cookie", "cookies", "set-cookie", "api-key", "x-api-key",
    "X-Api-Key", "dbPassword", "openaiApiKey", "OpenAIKey", "APIKey", "api_keys", "apiKeys", "access_tokens",
    "connection_string", "connectionString", "DSN", "jwt", "api_key_2", "password1", "logger.wandb.key",
    "api_key.value", "secrets.judge.0",
]  # fmt: skip

EVERYDAY_NAMES = [
    "max_tokens", "tokenizer", "pad_token", "key", "author", "token_budget", "keys", "passes", "eos_token_id",
    "authentic", "keyword", "monkey", "cookies_per_day", "tokens_per_second", "num_tokens", "max_new_tokens",
    "primary_key", "sort_key", "bos_token", "image_token", "skip_special_tokens", "api_key_env", "public_key",
    "metrics_tls_key", "loss_per_token", "stop_tokens", "rewards:contains_token", "prompt_key", "reward_fn_key",
    "image_key", "video_key", "audio_key", "teacher_key", "response_key", "messages_key", "tools_key",
    "data_source_key", "enable_thinking_key", "reward_model_key", "gdpo_reward_keys", "max_num_batched_tokens",
    "num_speculative_tokens", "balance_dp_token", "teacher_models.teacher_model1.key", "embed_tokens",
    "batch_num_tokens", "data.input_key", "data.label_key", "data.image_key", "data.output_key", "chosen_key",
    "rejected_key", "rollout.max_tokens_per_gpu", "eos_token", "pad_token", "fork_threshold_tokens", "hub_model_id",
]  # fmt: skip
"""Names of many projects; then verl's, OpenRLHF's and TRL's."""

SECRET_VALUES = [
    "https://canary@host/x", "https://user:canary@host", "postgresql://user:canary@host/db",
    "https://host/x?a=1&api_key=canary", "https://host/x?key=canary", "Server=host;Password=canary",
    "-----BEGIN RSA PRIVATE KEY-----\ncanary\n-----END RSA PRIVATE KEY-----",
]  # fmt: skip
EVERYDAY_VALUES = [
    "https://host/x@v1", "https://host/x?at=me@home", "https://host?max_tokens=5&sort_key=a",
    "abfss://container@account/x", "ssh://git@host/x", "https://host", "a token=5", 7,
]  # fmt: skip


def test_no_setting_of_the_library_is_a_secret():
    folders = ("algorithm", "classic", "config", "data", "engine", "environment", "recipe", "script")
    files = chain.from_iterable((ROOT / "dlrover/python/rl" / folder).rglob("*.py") for folder in folders)
    nodes = chain.from_iterable(ast.walk(ast.parse(file.read_text())) for file in files)
    classes = [node for node in nodes if isinstance(node, ast.ClassDef) and node.decorator_list]
    fields = {ast.unparse(item.target) for node in classes for item in node.body if isinstance(item, ast.AnnAssign)}
    assert {"env", "max_new_tokens", "trackers"} < fields
    assert [name for name in fields if is_secret_at(f"config.{name}", 1)] == []


def test_variables_of_a_role_have_precedence():
    secrets = {"env.A_KEY": "of all", "workload.actor.env.A_KEY": "own", "workload.rollout.env.B_KEY": "of others"}
    assert (variables_of(secrets, "ACTOR"), variables_of(secrets)) == ({"A_KEY": "own"}, {"A_KEY": "of all"})


def test_secrets_are_found_by_name_or_value():
    missed = [name for name in SECRET_NAMES if not is_secret_at(f"config.{name}", "x")]
    missed += [value for value in SECRET_VALUES if not is_secret_at("config.place", value)]
    refused = [name for name in EVERYDAY_NAMES if is_secret_at(f"config.{name}", "x")]
    refused += [value for value in EVERYDAY_VALUES if is_secret_at("config.place", value)]
    assert (missed, refused) == ([], [])


@pytest.mark.parametrize("file", sorted((ROOT / "examples").rglob("*.y*ml")), ids=lambda file: file.parent.name)
def test_no_setting_of_an_example_is_a_secret(file):
    assert seal(load_job(file))[1] == {}


TYPED = """
trainer: {module: m, class: T, device_type: CPU, device_per_node: 2}
workload: {actor: {module: m, class: A}}
config:
  password: 12345678
  pin: {password: 0.5, token: 00}
  api_key: {value: canary-1, more: [canary-2, 7654321]}
  cookie: !!binary Y2FuYXJ5/w==
  headers: {Authorization: Bearer canary-3, Accept: text}
  none: {password: null, token: true, secret: ""}
"""


def test_seal_keeps_types_of_all_values_below_a_secret_key():
    job = load_job_text(TYPED, "job")
    sealed, secrets = seal(job)
    assert set(secrets) == {
        *(f"config.{name}" for name in ("password", "pin.password", "pin.token", "cookie", "headers.Authorization")),
        *(f"config.api_key.{name}" for name in ("value", "more.0", "more.1")),
    }
    text = job_to_yaml(job, hide_secrets=True)
    assert not [word for word in ("canary", "Y2Fu", "12345678", "7654321") if word in text]
    assert yaml.safe_load(text)["config"]["none"] == {"password": None, "token": True, "secret": ""}
    again = load_job_text(text, "job")
    assert sorted(hidden_in(again)) == sorted(hidden_in(sealed)) == sorted(secrets)
    assert seal(again)[1] == {}
    for hidden in (sealed, again, pickle.loads(pickle.dumps(sealed))):
        config = OmegaConf.to_container(unseal(hidden, secrets).config)
        assert config == OmegaConf.to_container(job.config)
        assert [type(config["password"]), type(config["pin"]["password"])] == [int, float]
    config = unseal(sealed, {"config.password": "hunter22", "config.api_key.more.1": "0123"}).config
    assert (config.password, config.api_key.more[1]) == ("hunter22", "0123"), "text, if it was changed"


def test_seal_takes_a_typed_read_only_config(job):
    @dataclass
    class Settings:
        password: int = 12345678

    config = OmegaConf.structured(Settings)
    OmegaConf.set_readonly(config, True)
    sealed, secrets = seal(replace(job, config=config))
    assert secrets["config.password"] == "12345678" and b"12345678" not in pickle.dumps(sealed.env)
    assert sealed.config.password.startswith(HIDDEN)
    assert unseal(sealed, secrets).config.password == 12345678


def test_without_secrets_hides_secrets_and_known_values(monkeypatch):
    monkeypatch.setattr(log, "_secrets", ())
    hide_values(["hunter22"])
    values = {"judge": {"api_key": 12345678, "urls": ["https://canary@host"]}, "note": "a hunter22", "steps": 3}
    shown = {"judge": {"api_key": HIDDEN, "urls": [HIDDEN]}, "note": f"a {HIDDEN}", "steps": 3}
    assert without_secrets(values) == shown
    assert without_secrets({"MODE": "x", "API_KEY": "y"}, "env") == {"MODE": "x", "API_KEY": HIDDEN}


def test_known_values_are_hidden_in_texts_and_causes(monkeypatch):
    monkeypatch.setattr(log, "_secrets", ())
    hide_values(["hunter22", "hunter22-and-more", "short", HIDDEN])
    assert redacted("a hunter22-and-more, a hunter22, short") == f"a {HIDDEN}, a {HIDDEN}, short"
    assert redacted_bytes(b"x hunter22") == b"x ***"
    cause = Cause(CauseKind.USER_ERROR, "trainer", "refused: hunter22", "line\nhunter22\n")
    assert "hunter22" not in f"{cause.message}{cause.detail}" and HIDDEN in cause.detail


def test_lines_and_escapes_of_a_known_value_are_hidden(monkeypatch):
    monkeypatch.setattr(log, "_secrets", ())
    pem = "-----BEGIN PRIVATE KEY-----\n  MIICdgIBADANBgkq\r\nhkiG9w0BAQEFAASC\nx=\n-----END PRIVATE KEY-----\n"
    hide_values([pem, "hunter22\n"])
    for line in pem.splitlines():
        assert redacted(f"[{line.strip()}]") == ("[x=]" if line == "x=" else f"[{HIDDEN}]")
    assert redacted(f"refused: {pem!r}") == f"refused: '{HIDDEN}'"
    assert redacted_bytes(b"key: MIICdgIBADANBgkq, hunter22") == b"key: ***, ***"
