"""Training against two rollout servers, held to the same run with its own engine."""

import httpx
import pytest
from tests.core.rollout_engine.service.conftest import BEARER, TOKEN, serving
from tests.e2e.runs import curve, overrides, sevens_reward, train

from verl.core.checkpoint_engine.disk import read_full

pytestmark = pytest.mark.e2e

ROLLOUT = "actor_rollout_ref__rollout"
SAMPLED = ("critic/score/mean", "critic/advantages/max", "response_length/mean", "response_length/max")
LEARNED = ("actor/pg_loss", "actor/grad_norm", "actor/entropy")


@pytest.fixture
def words(tiny_model, tiny_data, tmp_path, monkeypatch):
    """Command lines of runs in folders of their own: words("two", **changes)."""
    monkeypatch.setenv("VERL_SERVE_TOKEN", TOKEN)

    def make(name, **changes):
        settings = {"actor_rollout_ref__actor__optim__lr": 1e-2, **sevens_reward(tmp_path), **changes}
        return overrides(tiny_model, tiny_data, tmp_path / name, **settings)

    return make


@pytest.fixture
def pair(tiny_model):
    with serving(tiny_model) as one, serving(tiny_model) as two:
        yield one, two


def servers(*running) -> dict[str, object]:
    return {f"{ROLLOUT}__name": "server", f"{ROLLOUT}__server__urls": f"[{','.join(r.url for r in running)}]"}


def test_two_servers_give_the_samples_of_the_engine_in_this_process(words, pair, tmp_path):
    assert train(words("one")) == 0
    assert train(words("two", **servers(*pair))) == 0
    for name in SAMPLED:
        assert curve(tmp_path / "two", name) == curve(tmp_path / "one", name), name
    for name in LEARNED:
        assert curve(tmp_path / "two", name) == pytest.approx(curve(tmp_path / "one", name), rel=1e-4, abs=1e-6), name
    one, two = (read_full(tmp_path / run / "global_step_2/actor/model") for run in ("one", "two"))
    assert all(two[name].allclose(tensor, atol=1e-4) for name, tensor in one.items())
    assert all(server.service.loop.totals.response_tokens > 0 for server in pair)
    assert {server.state()["version"] for server in pair} == {2}
    assert [server.state()["slots_used"] for server in pair] == [0, 0]


def test_servers_generate_while_the_trainer_trains(words, pair, tmp_path):
    """Without staleness the samples of the synchronous run; else requests that an update of the weights stops go on."""
    ahead = {"trainer__pipeline": "fully_async", "data__max_response_length": 48, "trainer__total_training_steps": 4}
    changes = {**ahead, "async_training__staleness_threshold": 0, "trainer__total_training_steps": 2}
    one, two = words("one", data__max_response_length=48), words("two", **servers(*pair), **changes)
    assert train(one) == train(two) == 0
    for name in SAMPLED:
        assert curve(tmp_path / "two", name) == curve(tmp_path / "one", name), name
    assert train(words("ahead", **servers(*pair), **ahead)) == 0
    ages = curve(tmp_path / "ahead", "training/staleness_max")
    assert ages[0] == 0
    assert max(ages) >= 1
    assert max(curve(tmp_path / "ahead", "training/partial_samples")) > 0
    assert [server.state()["slots_used"] for server in pair] == [0, 0]


def test_a_run_is_refused_before_a_model_is_loaded(words, pair, byte_model, capsys):
    assert (
        train(words("none", **{f"{ROLLOUT}__name": "server", f"{ROLLOUT}__server__urls": "[http://127.0.0.1:1]"})) == 2
    )
    assert "no server answers (http://127.0.0.1:1" in capsys.readouterr().err
    with serving(byte_model) as other:
        assert train(words("other", **servers(pair[0], other))) == 2
    assert f"rollout server {other.url} has a qwen2 model of 259 tokens" in capsys.readouterr().err
    assert train(words("long", **servers(*pair), data__max_response_length=5000)) == 2
    assert "Start it with rollout.max_model_len=5016" in capsys.readouterr().err
    httpx.post(f"{pair[0].url}/resume", headers=BEARER).raise_for_status()  # nothing has changed them
    assert pair[0].state()["weights"] == "as loaded"
