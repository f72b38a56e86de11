import pytest
import torch
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel

from verl.config.schema import RolloutConfig
from verl.core.rollout_engine.api import Feed, Request, SamplingParams
from verl.core.rollout_engine.hf_engine import HFEngine
from verl.errors import CheckpointError, UserError

from .models import prompts, requests, tiny_model, tokens, worst_log_prob_error


@pytest.fixture(scope="module")
def gpt2():
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=50, n_embd=32, n_layer=2, n_head=2, n_positions=128, initializer_range=0.4,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return GPT2LMHeadModel(config).eval()


def test_log_probs_of_a_family_that_only_transformers_computes(gpt2):
    engine = HFEngine(gpt2, config=RolloutConfig(max_num_seqs=4))
    asked = requests(5, 1, 9, n=3, temperature=0.8, top_k=20)
    answers = engine.generate(asked)
    assert worst_log_prob_error(gpt2, asked, answers, temperature=0.8) < 1e-4
    assert tokens(answers) == tokens(engine.generate(asked))
    assert tokens(answers) != tokens(engine.generate(requests(5, 1, 9, n=3, temperature=0.8, top_k=20, seed=1)))
    assert engine.stats.response_tokens == 9 * 8


def test_same_tokens_as_the_native_engine():
    from verl.core.rollout_engine.engine import NativeEngine

    model = tiny_model("qwen2")
    asked = requests(5, 2, 9, n=2, stop_token_ids=(4, 5, 6), top_p=0.9)
    native = NativeEngine(model.config, weights=dict(model.named_parameters())).generate(asked)
    ours = HFEngine(model).generate(asked)
    assert tokens(ours) == tokens(native)
    assert [[c.finish_reason for c in g] for g in ours] == [[c.finish_reason for c in g] for g in native]


def test_stop_tokens_limits_and_unlike_sampling(gpt2):
    engine = HFEngine(gpt2)
    (prompt,) = prompts(6)
    free = engine.generate([Request(prompt, SamplingParams(12, n=6))])[0]
    stop = free[0].token_ids[2]
    asked = [
        Request(prompt, SamplingParams(12, n=6, stop_token_ids=(stop,))),
        Request(prompt, SamplingParams(5)),
        Request(prompt, SamplingParams(1, temperature=0.0)),
    ]
    stopped, short, greedy = engine.generate(asked)
    for a, b in zip(free, stopped):
        end = a.token_ids.index(stop) + 1 if stop in a.token_ids else 12
        assert b.token_ids == a.token_ids[:end]
        assert b.finish_reason == ("stop" if stop in a.token_ids else "length")
    assert short[0].token_ids == free[0].token_ids[:5]
    assert greedy[0].token_ids == [int(gpt2(torch.tensor([prompt])).logits[0, -1].argmax())]


def test_the_model_s_own_generation_config_and_mode_do_not_matter_and_stay(gpt2):
    engine = HFEngine(gpt2)
    asked = requests(5, n=2)
    plain = tokens(engine.generate(asked))
    own = GenerationConfig(repetition_penalty=9.0, eos_token_id=[plain[0][0][0]], max_length=3)
    saved, gpt2.generation_config = gpt2.generation_config, own
    try:
        gpt2.train()
        assert tokens(engine.generate(asked)) == plain
        assert gpt2.generation_config is own
        assert gpt2.training
    finally:
        gpt2.generation_config = saved
        gpt2.eval()


def test_abort_hands_back_what_there_is(gpt2):
    engine = HFEngine(gpt2, config=RolloutConfig(max_num_seqs=2))
    forwards = []

    def after_four_tokens(*_):
        forwards.append(None)
        if len(forwards) == 4:
            engine.abort([1, 2])

    hook = gpt2.register_forward_hook(after_four_tokens)
    try:
        results = {request: completion for request, _, completion in engine.stream(requests(4, 5, 6, max_tokens=9))}
    finally:
        hook.remove()
    assert (results[0].finish_reason, len(results[0].token_ids)) == ("length", 9)
    assert (results[1].finish_reason, len(results[1].token_ids)) == ("abort", 4)
    assert (results[2].finish_reason, len(results[2].token_ids)) == ("abort", 0)  # had not begun


def test_requests_that_come_while_a_stream_runs(gpt2):
    engine = HFEngine(gpt2, config=RolloutConfig(max_num_seqs=4))
    asked = requests(4, 5, 6, n=2)
    later = [[asked[1]], [], [asked[2]], None]
    feed = Feed(lambda idle: later.pop(0), asked[0].sampling, longest=64, samples=4)
    got = {(request, i): completion.token_ids for request, i, completion in engine.stream(asked[:1], feed)}
    assert got == {(r, i): ids for r, group in enumerate(tokens(engine.generate(asked))) for i, ids in enumerate(group)}
    assert later == []


def test_weights_are_copied_checked_or_already_there():
    model, other = tiny_model("llama"), tiny_model("llama", initializer_range=0.1)
    engine = HFEngine(model)
    engine.load_weights(((n, p) for n, p in other.named_parameters()), version=4)
    asked = requests(5)
    answers = engine.generate(asked)
    assert worst_log_prob_error(other, asked, answers) < 1e-4
    assert answers[0][0].version == 4
    engine.load_weights((), version=5)
    assert engine.version == 5
    with pytest.raises(CheckpointError, match=r"did not come: model\.norm\.weight"):
        engine.load_weights(((n, p) for n, p in other.named_parameters() if n != "model.norm.weight"), 6)
    with pytest.raises(CheckpointError, match="no such weight"):
        engine.load_weights([("model.nrom.weight", torch.ones(48))], 6)


def test_weights_that_have_diverged_are_told_of():
    model = tiny_model("qwen2")
    model.model.norm.weight.data.fill_(float("nan"))
    with pytest.raises(UserError, match="logits are not finite"):
        HFEngine(model).generate(requests(5))
