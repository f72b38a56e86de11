"""Ask a model that `verl serve` serves, through OpenAI's client: python3 examples/ask.py "12+34=" [URL]"""

import sys

import openai


def ask(question: str, url: str = "http://127.0.0.1:8000") -> str:
    """The greedy answer, printed as it comes."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="any")
    (model,) = client.models.list().data
    pieces = client.chat.completions.create(
        model=model.id,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=64,
        stream=True,
    )
    answer = ""
    for piece in pieces:
        text = piece.choices[0].delta.content or ""
        print(text, end="", flush=True)
        answer += text
    print()
    return answer


if __name__ == "__main__":
    ask(*sys.argv[1:])
