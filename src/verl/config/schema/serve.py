"""The config of `verl serve`."""

from dataclasses import dataclass

from verl.config.schema.options import opt


@dataclass
class ServeRolloutConfig:
    name: str = opt("native", "generation engine", choices=("native", "hf", "vllm"))
    max_model_len: int | None = opt(
        None, "longest prompt plus response, in tokens; null: the model's, up to 8192", min=2
    )
    dtype: str | None = opt(
        None, "precision; null: bfloat16 on a GPU, float32 on a CPU", choices=("float32", "bfloat16")
    )
    max_num_seqs: int = opt(256, "sequences in generation at once", min=1)
    max_num_batched_tokens: int = opt(16384, "prompt tokens computed at once", min=1)
    gpu_memory_utilization: float = opt(0.8, "share of the GPU's memory to use, weights included", above=0, max=1)
    enforce_eager: bool = opt(False, "no CUDA graphs")
    tensor_model_parallel_size: int = opt(1, "devices that share one copy of the model", min=1)


@dataclass
class ServeConfig:
    model: str | None = opt(None, "a Hugging Face directory or model id (must be given)")
    tokenizer: str | None = opt(None, "tokenizer directory or id; null: the model's")
    served_name: str | None = opt(None, "the model's name in the API; null: the last part of its path")
    trust_remote_code: bool = opt(False, "run Python code that comes with the model")
    host: str = opt("127.0.0.1", "address to listen on; 0.0.0.0 is every network that this machine is in")
    port: int = opt(8000, "port to listen on; 0: any free one", min=0, max=65535)
    device: str | None = opt(None, "cuda or cpu; null: cuda if there is one", choices=("cuda", "cpu"))
    max_waiting: int = opt(4096, "requests that may wait for a slot; more are answered with 429", min=1)
    max_body_megabytes: float = opt(16.0, "largest body of a request; larger ones are answered with 413", above=0)
    rollout: ServeRolloutConfig = opt(ServeRolloutConfig, "generation")
