"""`benchmarks/rollout.py` runs, and reads answers as it says."""

import json
import sys

import pytest
from tests.scripts import load_benchmark


@pytest.fixture(scope="module")
def rollout():
    return load_benchmark("rollout")


def test_smoke(rollout, monkeypatch, tmp_path, capsys):
    output = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", ["rollout.py", "--smoke", "--device", "cpu", "--json", str(output)])
    rollout.main()
    results = json.loads(output.read_text())["results"]
    assert [r["engine"] for r in results] == ["native", "transformers"] * 2
    assert [r["tokens"] for r in results[:2]] == [4 * 8] * 2
    assert results[2]["tokens"] == results[3]["tokens"] < 4 * 8
    assert "tokens/s" in capsys.readouterr().out


def test_gsm8k_with_a_model(rollout, monkeypatch, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from .models import tiny_model

    words = Tokenizer(
        models.WordLevel({"<eos>": 0, "<unk>": 1, **{str(n): n for n in range(2, 50)}}, unk_token="<unk>")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", unk_token="<unk>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    tiny_model("qwen2").save_pretrained(tmp_path)
    lines = [json.dumps({"question": f"{i} 4", "answer": f"so\n#### {i}"}) for i in range(3)]
    (tmp_path / "test.jsonl").write_text("\n".join(lines))
    output = tmp_path / "figures.json"
    arguments = ["--model", str(tmp_path), "--gsm8k", str(tmp_path), "--max-tokens", "6", "--dtype", "float32"]
    monkeypatch.setattr(
        sys, "argv", ["rollout.py", *arguments, "--device", "cpu", "--json", str(output), "--repeats", "1"]
    )
    rollout.main()
    (result,) = json.loads(output.read_text())["results"]
    assert 0 <= result["accuracy"] <= 1
    assert 3 <= result["tokens"] <= 18


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("she has 3 + 4 = 7 eggs", "7"),
        ("#### 1,200.", "1200"),
        ("it costs $18.00", "18"),
        ("it costs $18.50", "18.50"),
        ("-5", "-5"),
        ("no", None),
    ],
)
def test_last_number(rollout, text, number):
    assert rollout.last_number(text) == number


def test_truth(rollout):
    assert rollout.truth({"answer": "a <<1+1=2>> b\n#### 1,002"}) == "1002"
