# SPDX-License-Identifier: Apache-2.0
"""Which values are secrets, and a job without them."""

import pickle

import pytest
from omegaconf import OmegaConf

from dlrover.python.rl.common import redaction
from dlrover.python.rl.common.redaction import HIDDEN, hide_values, redacted, redacted_bytes
from dlrover.python.rl.config.layout import job_to_yaml
from dlrover.python.rl.config.load import load_job_text
from dlrover.python.rl.config.secrets import hidden_in, is_secret_key, seal, unseal, variables_of
from dlrover.python.rl.control.events import Cause, CauseKind

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


def test_a_sealed_job_has_none_of_them_however_it_is_written(job):
    sealed, secrets = seal(job)
    assert {value[:6] for value in secrets.values()} == {"canary", "https:"}
    assert set(secrets) == {
        "env.API_KEY",
        "workload.actor.env.MEMBER_TOKEN",
        "config.judge.api_key",
        "config.judge.url",
        "config.copies.0.password",
    }
    assert b"canary" not in pickle.dumps(sealed)
    assert "canary" not in job_to_yaml(job, hide_secrets=True)
    assert sorted(hidden_in(sealed)) == sorted({*secrets})
    assert sealed.config.tokenizer.pad_token == "<pad>" and sealed.config.max_tokens == "512"


def test_an_unsealed_job_is_the_job_again(job):
    sealed, secrets = seal(job)
    again = unseal(pickle.loads(pickle.dumps(sealed)), secrets)
    assert OmegaConf.to_container(again.config, resolve=True) == OmegaConf.to_container(job.config, resolve=True)
    assert again.config.reference == "canary-2"
    assert again.env == job.env and again.workloads == job.workloads
    assert not hidden_in(again)


def test_a_job_without_secrets_is_left_alone():
    job = load_job_text(JOB.replace("canary", "x").partition("env: {API")[0].replace("MEMBER_TOKEN", "MODE"), "job")
    sealed, secrets = seal(job)
    assert not secrets and sealed.config is job.config


def test_variables_of_a_role_have_precedence():
    secrets = {"env.A_KEY": "of all", "workload.actor.env.A_KEY": "own", "workload.rollout.env.B_KEY": "of others"}
    assert variables_of(secrets, "ACTOR") == {"A_KEY": "own"}
    assert variables_of(secrets) == {"A_KEY": "of all"}


@pytest.mark.parametrize(
    "name", ["api_key", "apikey", "password", "judge_api_key", "hf_token", "token", "client_secret"]
)
def test_keys_that_are_secrets(name):
    assert is_secret_key(name, "x")


@pytest.mark.parametrize(
    "name", ["max_tokens", "tokenizer", "pad_token", "key", "author", "token_budget", "keys", "passes", "eos_token_id"]
)
def test_everyday_keys_are_none(name):
    assert not is_secret_key(name, "x")


def test_known_values_are_hidden_in_texts_logs_and_causes(monkeypatch):
    monkeypatch.setattr(redaction, "_known", ())
    hide_values(["hunter22", "hunter22-and-more", "short", HIDDEN])
    assert redacted("a hunter22-and-more, a hunter22, short") == f"a {HIDDEN}, a {HIDDEN}, short"
    assert redacted_bytes(b"x hunter22") == b"x ***"
    cause = Cause(CauseKind.USER_ERROR, "trainer", "refused: hunter22", "line\nhunter22\n")
    assert "hunter22" not in f"{cause.message}{cause.detail}" and HIDDEN in cause.detail
