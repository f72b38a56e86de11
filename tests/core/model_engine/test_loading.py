"""Where a model comes from, and what is said where it cannot come."""

import logging
import socket
import time

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from tests.core.model_engine.conftest import make_pair

from verl.core.model_engine import loading
from verl.core.model_engine.loading import end_tokens, load_config, load_policy, load_tokenizer, resolve_model_path
from verl.errors import ConfigError


@pytest.fixture
def no_network(monkeypatch, tmp_path):
    """No name has an address, and nothing was downloaded before."""

    def fail(*arguments, **options):
        raise socket.gaierror(-3, "Temporary failure in name resolution")

    for variable in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.delenv("VERL_USE_MODELSCOPE", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(socket, "getaddrinfo", fail)
    loading._knock.cache_clear()
    yield
    loading._knock.cache_clear()


def test_a_hub_without_an_address_is_one_message_and_no_retries(no_network, caplog):
    with pytest.raises(ConfigError) as error:
        resolve_model_path("nope/model")
    said = "actor_rollout_ref.model.path=nope/model: not a folder here, and the hub cannot be reached (no address for "
    assert str(error.value).startswith(said)
    assert caplog.records == []


def test_an_earlier_download_is_taken_where_the_hub_has_no_address(no_network, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda path, local_files_only: f"cache/{path}")
    assert resolve_model_path("some/model") == "cache/some/model"


def test_a_hub_that_does_not_answer_is_one_message_within_seconds(no_network, monkeypatch):
    def silent(address, timeout):
        assert address[1] == 443
        waited.append(timeout)
        raise TimeoutError("timed out")

    waited = []
    monkeypatch.setattr(socket, "create_connection", silent)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"the hub cannot be reached \(.* does not answer within 5 s\)"):
            resolve_model_path("nope/model")
    assert waited == [5]  # found out once


def test_a_hub_that_takes_long_is_told_of(monkeypatch, capsys):
    monkeypatch.setattr(loading, "NOTICE_SECONDS", 0.05)

    def load(path, **options):
        time.sleep(0.3)
        raise OSError("gave up")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", load)
    with pytest.raises(ConfigError, match="gave up"):
        load_tokenizer("some/model")
    assert "still fetching the tokenizer of some/model from" in capsys.readouterr().err


def test_behind_a_proxy_the_name_is_not_looked_up(no_network, monkeypatch):
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    assert resolve_model_path("some/model") == "some/model"


def test_the_hub_s_retries_are_not_shown(monkeypatch):
    logger = logging.getLogger("huggingface_hub.utils._http")
    levels = []

    def load(path, **options):
        levels.append(logger.getEffectiveLevel())
        raise OSError("We could not connect.\nMore words.")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", load)
    before = logger.getEffectiveLevel()
    with pytest.raises(ConfigError) as error:
        load_tokenizer("some/model")
    assert str(error.value) == (
        "actor_rollout_ref.model.path=some/model: cannot load the tokenizer: We could not connect."
    )
    assert levels == [logging.ERROR]
    assert logger.getEffectiveLevel() == before


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ({"hidden_size": 64}, r"override_config\.hidden_size=64: does not fit the checkpoint"),
        ({"num_hidden_layers": 3}, r"override_config\.num_hidden_layers=3: does not fit the checkpoint"),
        ({"hidden_size": "wide"}, r"override_config\.hidden_size=wide: .*expected int"),
        ({"hidden_act": "none"}, r"override_config\.hidden_act=none: does not fit"),
    ],
    ids=str,
)
def test_a_config_put_over_the_checkpoint_s_has_to_fit_it(tmp_path, override, words):
    make_pair()[0].save_pretrained(tmp_path)
    path = str(tmp_path)
    with pytest.raises(ConfigError, match=words):
        load_policy(path, load_config(path, override=override), torch.float32, override=override)


def test_end_tokens_are_the_tokenizers_and_the_generation_configs():
    class Told:
        def __init__(self, eos):
            self.eos_token_id = eos

    assert end_tokens(Told(5), Told([7, 5])) == (5, 7)
    assert end_tokens(Told(None), Told(3)) == (3,)
    assert end_tokens(Told(2), None) == (2,)
