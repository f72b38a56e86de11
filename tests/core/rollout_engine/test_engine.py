import weakref

import pytest
import torch

from verl.config.schema import RolloutConfig
from verl.core.rollout_engine import engine as engine_module
from verl.core.rollout_engine.api import Feed, Request, SamplingParams
from verl.core.rollout_engine.engine import NativeEngine, compute_dtype
from verl.errors import CheckpointError, ConfigError, UserError

from .models import FAMILIES, prompts, requests, shared_model, tiny_config, tiny_model, tokens, worst_log_prob_error


def in_place_engine(model, **config) -> NativeEngine:
    return NativeEngine(model.config, config=RolloutConfig(**config), weights=dict(model.named_parameters()))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("in_place", [True, False])
def test_log_probs_are_those_of_transformers(family, in_place):
    model = shared_model(family)
    engine = NativeEngine(model.config, weights=dict(model.named_parameters()) if in_place else None)
    if not in_place:
        engine.load_weights(model.state_dict().items(), version=1)
    assert engine.in_place is in_place
    asked = requests(5, 1, 9, 5, 70, n=3, max_tokens=12, temperature=0.7)
    assert worst_log_prob_error(model, asked, engine.generate(asked), temperature=0.7) < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(family):
    model = shared_model(family)
    asked = requests(4, 11, temperature=0.0, max_tokens=16)
    answers = in_place_engine(model).generate(asked)
    for request, (completion,) in zip(asked, answers):
        ids = torch.tensor([request.prompt_ids])
        whole = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=16)
        assert completion.token_ids == whole[0, len(request.prompt_ids) :].tolist()
    assert worst_log_prob_error(model, asked, answers) < 1e-4


def test_bfloat16_weights_are_computed_in_float32_where_the_cpu_has_no_bfloat16(monkeypatch):
    monkeypatch.setattr(engine_module, "cpu_has_fast_bf16", lambda: False)
    cpu = torch.device("cpu")
    assert compute_dtype(cpu, torch.bfloat16) == torch.float32
    model = tiny_model("qwen2")
    for parameter in model.parameters():  # the model's own .to() would round the rotary frequencies too
        parameter.data = parameter.data.bfloat16()
    engine = in_place_engine(model)
    assert not engine.in_place
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    asked = requests(5, 9)
    assert worst_log_prob_error(model, asked, engine.generate(asked)) < 1e-4
    monkeypatch.setattr(engine_module, "cpu_has_fast_bf16", lambda: True)
    assert compute_dtype(cpu, torch.bfloat16) == torch.bfloat16
    assert compute_dtype(torch.device("cuda"), None) == torch.bfloat16


def test_bfloat16_computation_is_near_float32(monkeypatch):
    monkeypatch.setattr(engine_module, "cpu_has_fast_bf16", lambda: True)
    model = tiny_model("llama", initializer_range=0.05)
    engine = NativeEngine(model.config, dtype=torch.bfloat16)
    engine.load_weights(model.named_parameters(), version=0)
    asked = requests(5, 9, temperature=0.0)
    assert engine.dtype == torch.bfloat16
    assert worst_log_prob_error(model, asked, engine.generate(asked)) < 0.05


def test_an_optimizer_step_is_seen_at_once_in_place():
    model = tiny_model("qwen2")
    engine = in_place_engine(model)
    asked = requests(6, 3, n=2)
    before = tokens(engine.generate(asked))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) * 0.1
    optimizer.step()
    engine.load_weights((), version=7)
    after = engine.generate(asked)
    assert tokens(after) != before
    assert worst_log_prob_error(model, asked, after) < 1e-4
    assert engine.version == after[0][0].version == 7


def test_copied_weights_change_only_when_loaded():
    model = tiny_model("llama")
    engine = NativeEngine(model.config)
    engine.load_weights(model.named_parameters(), version=0)
    asked = requests(6)
    before = tokens(engine.generate(asked))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    assert tokens(engine.generate(asked)) == before
    engine.load_weights(model.named_parameters(), version=1)
    assert worst_log_prob_error(model, asked, engine.generate(asked)) < 1e-4


def test_in_place_weights_can_be_replaced_but_not_in_another_dtype():
    engine = in_place_engine(tiny_model("llama"))
    other = tiny_model("llama", initializer_range=0.1)
    asked = requests(6)
    engine.load_weights(other.named_parameters(), version=1)
    assert worst_log_prob_error(other, asked, engine.generate(asked)) < 1e-4
    with pytest.raises(ValueError, match=r"must stay torch\.float32"):
        engine.load_weights(((n, p.double()) for n, p in other.named_parameters()), version=2)


def test_tokens_do_not_depend_on_slots_batches_or_order():
    model = shared_model("qwen2")
    asked = requests(5, 1, 9, 5, 17, 2, n=3, max_tokens=10, stop_token_ids=(1, 2, 3, 4))
    whole = tokens(in_place_engine(model).generate(asked))
    for config in ({"max_num_seqs": 1}, {"max_num_seqs": 4, "max_num_batched_tokens": 6}, {"max_num_seqs": 7}):
        assert tokens(in_place_engine(model, **config).generate(asked)) == whole
    assert tokens(in_place_engine(model).generate(asked[::-1])) == whole[::-1]


def test_seeds_streams_and_samples_have_their_own_tokens():
    engine = in_place_engine(shared_model("qwen2"))
    (prompt,) = prompts(6)
    params = SamplingParams(max_tokens=12, n=4, seed=3)
    first = tokens(engine.generate([Request(prompt, params, 0), Request(prompt, params, 1)]))
    assert first == tokens(engine.generate([Request(prompt, params, 0), Request(prompt, params, 1)]))
    assert len({tuple(t) for group in first for t in group}) == 8
    other_seed = tokens(engine.generate([Request(prompt, SamplingParams(max_tokens=12, n=4, seed=4), 0)]))
    assert not {tuple(t) for t in other_seed[0]} & {tuple(t) for t in first[0]}


def test_a_prompt_is_computed_once_for_its_samples():
    engine = in_place_engine(shared_model("llama"))
    engine.generate(requests(6, 9, n=5))
    assert engine.stats.prompt_tokens == 15
    assert engine.stats.response_tokens == 2 * 5 * 8
    assert engine.stats.decode_steps == 8


def test_stop_tokens_end_a_sample_and_are_kept():
    engine = in_place_engine(shared_model("qwen2"))
    asked = requests(5, 9, n=8, max_tokens=20)
    free = engine.generate(asked)
    stop = (free[0][0].token_ids[3], free[1][2].token_ids[5])
    for whole, cut in zip(free, engine.generate(requests(5, 9, n=8, max_tokens=20, stop_token_ids=stop))):
        for a, b in zip(whole, cut):
            end = next((i + 1 for i, t in enumerate(a.token_ids) if t in stop), 20)
            assert b.token_ids == a.token_ids[:end]
            assert b.log_probs == pytest.approx(a.log_probs[:end], abs=1e-5)
            assert b.finish_reason == ("stop" if a.token_ids[end - 1] in stop else "length")
    ignoring = engine.generate(requests(5, 9, n=8, max_tokens=20, stop_token_ids=stop, ignore_eos=True))
    assert tokens(ignoring) == tokens(free)


def test_each_request_has_its_own_limit_and_number_of_samples():
    engine = in_place_engine(shared_model("llama"), max_num_seqs=3)
    limits = [(3, 1), (1, 4), (11, 2)]
    asked = [
        Request(ids, SamplingParams(max_tokens=limit, n=n), i)
        for i, (ids, (limit, n)) in enumerate(zip(prompts(4, 7, 2), limits))
    ]
    answers = engine.generate(asked)
    assert [[len(c.token_ids) for c in group] for group in answers] == [[3], [1] * 4, [11] * 2]
    assert {c.finish_reason for group in answers for c in group} == {"length"}


def test_requests_with_unlike_sampling_share_a_call():
    model = shared_model("llama")
    engine = in_place_engine(model)
    (prompt,) = prompts(6)
    greedy, hot = SamplingParams(8, temperature=0.0), SamplingParams(8, temperature=2.0)
    mixed = engine.generate([Request(prompt, hot), Request(prompt, greedy), Request(prompt, hot, 1)])
    assert tokens(mixed)[1] == tokens(engine.generate([Request(prompt, greedy)]))[0]
    assert worst_log_prob_error(model, [Request(prompt, hot)], mixed[:1], temperature=2.0) < 1e-4


def test_the_stream_gives_short_samples_first_and_gradients_stay_on_for_its_consumer():
    engine = in_place_engine(shared_model("llama"))
    lengths = [20, 2, 9]
    asked = [Request(ids, SamplingParams(max_tokens=n)) for ids, n in zip(prompts(3, 3, 3), lengths)]
    order = []
    for request, _, completion in engine.stream(asked):
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
        order.append((request, len(completion.token_ids)))
    assert order == [(1, 2), (2, 9), (0, 20)]


def test_an_aborted_request_hands_back_its_tokens_and_can_go_on():
    model = shared_model("qwen2")
    engine = in_place_engine(model, max_num_seqs=3)
    asked = [
        Request(ids, SamplingParams(max_tokens=limit, n=2), i)
        for i, (ids, limit) in enumerate(zip(prompts(5, 5, 5), (4, 30, 30)))
    ]
    whole = in_place_engine(model).generate(asked)
    got = {}
    for request, sample, completion in engine.stream(asked):
        engine.abort([1, 2])
        got[request, sample] = completion
    assert len(got) == 6
    assert [got[0, i].token_ids for i in range(2)] == tokens(whole)[0]
    partial = got[1, 0]
    assert partial.finish_reason == "abort"
    assert 0 < len(partial.token_ids) < 30
    assert got[2, 1].token_ids == []  # never had a slot
    assert got[2, 1].finish_reason == "abort"
    assert partial.token_ids == whole[1][0].token_ids[: len(partial.token_ids)]
    rest = SamplingParams(max_tokens=30 - len(partial.token_ids))
    (continued,) = engine.generate([Request(asked[1].prompt_ids + partial.token_ids, rest, 1)])
    assert partial.token_ids + continued[0].token_ids == whole[1][0].token_ids


def test_a_sample_goes_on_under_its_own_number():
    engine = in_place_engine(shared_model("llama"))
    (ids,) = prompts(5)
    whole = engine.generate([Request(ids, SamplingParams(max_tokens=12, n=3), 7)])[0]
    begun = whole[2].token_ids[:5]
    ((rest,),) = engine.generate([Request(ids + begun, SamplingParams(max_tokens=7), 7, first=2)])
    assert begun + rest.token_ids == whole[2].token_ids
    assert len({tuple(c.token_ids) for c in whole}) == 3


def test_requests_fed_to_a_running_stream_give_what_they_give_by_themselves():
    engine = in_place_engine(shared_model("qwen2"), max_num_seqs=3)
    sampling = SamplingParams(max_tokens=9, n=2)
    asked = [Request(ids, sampling, stream) for stream, ids in enumerate(prompts(5, 3, 8, 2))]
    alone = engine.generate(asked)
    later = [[], [asked[1]], [], [asked[2], asked[3]], None]
    feed = Feed(lambda idle: later.pop(0), sampling, longest=17, samples=8)
    got = {(request, i): completion.token_ids for request, i, completion in engine.stream(asked[:1], feed)}
    assert got == {(r, i): ids for r, group in enumerate(tokens(alone)) for i, ids in enumerate(group)}


def test_a_copy_of_the_weights_changes_when_it_is_told_and_gives_the_same_bits():
    model = tiny_model("llama")
    weights = dict(model.named_parameters())
    reading, copy = in_place_engine(model), NativeEngine(model.config, weights=weights, own_copy=True)
    assert (reading.in_place, copy.in_place) == (True, False)
    asked = [Request(ids, SamplingParams(max_tokens=9, n=2), 3) for ids in prompts(5, 3)]
    before = reading.generate(asked)
    assert copy.generate(asked) == before
    with torch.no_grad():
        for parameter in weights.values():
            parameter.mul_(1.3)
    assert copy.generate(asked) == before
    after = reading.generate(asked)
    assert after != before
    copy.load_weights(weights.items(), version=0)
    assert copy.generate(asked) == after


def test_a_stream_left_early_leaves_nothing_behind():
    engine = in_place_engine(shared_model("llama"))
    asked = requests(4, 6, n=3)
    whole = tokens(engine.generate(asked))
    stream = engine.stream([Request(ids, SamplingParams(max_tokens=k)) for ids, k in zip(prompts(4, 4), (1, 50))])
    next(stream)
    with pytest.raises(RuntimeError, match="stream in progress"):
        engine.generate(asked)
    stream.close()
    assert tokens(engine.generate(asked)) == whole


def test_sleep_frees_the_cache_and_wake_gives_the_same_tokens():
    engine = in_place_engine(shared_model("llama"))
    asked = requests(4, 6, n=3)
    first = tokens(engine.generate(asked))
    keys = weakref.ref(engine._runner.cache.data)
    engine.sleep()
    assert keys() is None
    engine.wake()
    assert tokens(engine.generate(asked)) == first


def test_too_little_memory_means_fewer_slots_or_an_error_with_numbers(monkeypatch):
    model = shared_model("llama")
    asked = requests(10, 10, n=3, max_tokens=22)
    whole = tokens(in_place_engine(model).generate(asked))
    slot_bytes = 2 * 2 * 2 * 12 * 32 * 4  # keys and values, layers, kv heads, head_dim, positions, float32
    monkeypatch.setattr(engine_module, "cpu_budget", lambda: (2 * slot_bytes + 1, "this test"))
    engine = in_place_engine(model)
    assert tokens(engine.generate(asked)) == whole
    assert engine._runner.cache.slots == 2
    monkeypatch.setattr(engine_module, "cpu_budget", lambda: (slot_bytes - 1, "this test"))
    with pytest.raises(ConfigError, match=r"one sequence of 32 tokens needs .* this test leaves"):
        in_place_engine(model).generate(asked)


def test_errors_name_what_is_wrong():
    model = shared_model("llama")
    engine = in_place_engine(model)
    with pytest.raises(ValueError, match="request 1 has an empty prompt"):
        engine.generate([Request([5], SamplingParams(4)), Request([], SamplingParams(4))])
    with pytest.raises(ValueError, match="max_tokens is 0"):
        engine.generate([Request([5], SamplingParams(0))])
    with pytest.raises(ConfigError, match="257 tokens, and the model's max_position_embeddings is 256"):
        engine.generate([Request([5] * 200, SamplingParams(57))])
    with pytest.raises(RuntimeError, match="no weights yet"):
        NativeEngine(model.config).generate([Request([5], SamplingParams(4))])
    windowed = NativeEngine(tiny_config("mistral", sliding_window=16))
    windowed.load_weights(tiny_model("mistral").named_parameters(), 0)
    with pytest.raises(ConfigError, match="sliding_window is 16"):
        windowed.generate([Request([5] * 10, SamplingParams(7))])
    assert len(windowed.generate([Request([5] * 10, SamplingParams(6))])[0][0].token_ids) == 6


def test_weights_that_do_not_fit_are_listed():
    model = tiny_model("qwen3")
    weights = dict(model.named_parameters())
    weights["lm_heads.weight"] = weights.pop("lm_head.weight")
    weights["model.norm.weight"] = torch.ones(3)
    message = (
        r"model.norm.weight has shape \[3\], the model needs \[48\]; missing: lm_head.weight; unexpected: lm_heads"
    )
    with pytest.raises(CheckpointError, match=message):
        NativeEngine(model.config, weights=weights)
    with pytest.raises(CheckpointError, match=message):
        NativeEngine(model.config).load_weights(weights.items(), 0)


def test_no_requests_give_no_completions():
    assert in_place_engine(shared_model("llama")).generate([]) == []


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 5}], ids=str)
def test_weights_that_have_diverged_are_told_of(sampling):
    model = tiny_model("qwen2")
    engine = in_place_engine(model)
    model.model.norm.weight.data.fill_(float("nan"))
    with pytest.raises(UserError, match=r"logits are not finite.*Lower the learning rate"):
        engine.generate(requests(5, 9, n=2, **sampling))
    model.model.norm.weight.data.fill_(1.0)
    assert len(engine.generate(requests(5))[0][0].token_ids) == 8  # the engine is free for the next call
