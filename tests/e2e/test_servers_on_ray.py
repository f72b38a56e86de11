"""Training on two CPU workers of Ray against a rollout server, held to the same run on one device."""

import socket
import time

import httpx
import pytest
from tests.core.rollout_engine.service.conftest import TOKEN
from tests.core.rollout_engine.service.processes import start
from tests.e2e.runs import curve, overrides, sevens_reward, train

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("cluster")]

ROLLOUT = "actor_rollout_ref__rollout"
TWO = {"trainer__n_gpus_per_node": 2}
LEARNED = ("critic/score/mean", "actor/pg_loss", "actor/grad_norm", "actor/entropy", "response_length/mean")


@pytest.fixture(scope="module")
def server(tiny_model):
    """The address of a `verl serve` process."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    process = start(tiny_model, port, TOKEN)
    deadline = time.monotonic() + 60
    while not answers(f"http://127.0.0.1:{port}"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    yield f"http://127.0.0.1:{port}"
    process.terminate()
    process.join(30)


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture
def words(tiny_model, tiny_data, tmp_path, monkeypatch):
    """Command lines of runs in folders of their own: words("two", **changes)."""
    monkeypatch.setenv("VERL_SERVE_TOKEN", TOKEN)

    def make(name, **changes):
        settings = {
            "data__val_files": "null",
            "actor_rollout_ref__actor__optim__lr": 1e-2,
            "trainer__total_training_steps": 3,
            **sevens_reward(tmp_path),
            **changes,
        }
        return overrides(tiny_model, tiny_data, tmp_path / name, **settings)

    return make


def at(server: str, **settings) -> dict[str, object]:
    return {
        f"{ROLLOUT}__name": "server",
        f"{ROLLOUT}__server__urls": f"[{server}]",
        **{f"{ROLLOUT}__server__{key}": value for key, value in settings.items()},
    }


def test_two_workers_train_against_a_server_as_one_process_does(words, server, tmp_path):
    """Also with generation beside it and weights through a folder, where no sample may be old."""
    (tmp_path / "weights").mkdir()
    no_ahead = {"trainer__pipeline": "fully_async", "async_training__staleness_threshold": 0}
    assert train(words("one", **at(server))) == 0
    assert train(words("two", **TWO, **at(server, shares_devices=True))) == 0
    assert train(words("beside", **TWO, **no_ahead, **at(server, weights_folder=tmp_path / "weights"))) == 0
    for other in ("two", "beside"):
        for name in LEARNED:
            one, two = curve(tmp_path / "one", name), curve(tmp_path / other, name)
            assert two == pytest.approx(one, rel=2e-3, abs=1e-5), (other, name)
        apart = curve(tmp_path / other, "training/rollout_probs_diff_max")
        assert len(apart) == 3
        assert max(apart) < 1e-5  # the server's weights are the trainer's, after each update
    assert curve(tmp_path / "one", "actor/grad_norm")[-1] > 0.01  # or nothing was learned, and equal numbers say little
    assert list((tmp_path / "weights").iterdir()) == []


def test_a_server_generates_while_two_workers_train_and_a_third_has_the_critic(words, server, tmp_path):
    ahead = {"trainer__pipeline": "one_step_off", "algorithm__adv_estimator": "gae", "critic__optim__lr": 1e-2}
    critic = {"critic__nnodes": 1, "critic__n_gpus_per_node": 1}
    assert train(words("ahead", **TWO, **ahead, **critic, **at(server))) == 0
    assert curve(tmp_path / "ahead", "training/staleness_max") == [0, 1, 1]
    assert httpx.get(f"{server}/health").json()["version"] == 3
    assert curve(tmp_path / "ahead", "training/rollout_probs_diff_max")[0] < 1e-5
