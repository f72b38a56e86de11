"""The vLLM rollout engine: `rollout.name=vllm`. Importing this module does not import vLLM."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from verl.config.schema import RolloutConfig
from verl.core.rollout_engine import vllm_setup as setup
from verl.core.rollout_engine.api import Completion, Feed, Request, RolloutStats, SamplingParams
from verl.core.rollout_engine.requests import check_finite
from verl.core.rollout_engine.vllm_running import Running, mixed, vllm_sampling
from verl.core.rollout_engine.weight_buckets import BucketWriter
from verl.errors import ConfigError

_FINISH = {"stop": "stop", "length": "length"}


class VLLMEngine:
    """A vLLM engine that shares its device with the trainer (`RolloutEngine`).

    Where it runs: in this process (the default with one device: weights are copied straight from the trainer's tensors),
    or as vLLM's own engine process with `in_process=False` and always with tensor_model_parallel_size > 1: weights then
    travel through one shared bucket.

    Log-probs: `log_probs_exact` says whether those of the last call are what `Completion` promises. They are, unless top_k
    or top_p cut the distribution at a temperature other than the 1.0 at which vLLM reports uncut ones; then they are of
    the renormalised rest, and the trainer recomputes them.

    Random streams: with `sample_seeds` each sample has its own, of (seed, stream, sample), whatever runs beside it. That is
    so on a CPU and with vLLM's second model runner. The first one, on a GPU, draws for seeded samples one by one on the
    host, a millisecond or more a step for each hundred; there one stream is seeded a call, of all its requests: equal
    calls give equal tokens.

    Sleeping (CUDA, with `config.free_cache_engine`) discards the KV cache and the weights, since the trainer sends new
    ones anyway: after `wake`, `needs_weights` is true until `load_weights`, and `generate` refuses to run. To hold less at
    the peak, call `load_weights` first: it wakes the weights' memory alone. On a CPU sleeping does nothing: vLLM cannot give
    its memory back there.

    Args:
        model: a Hugging Face folder or id: its config.json decides the architecture.
        device, dtype: of the computation.
        config: `actor_rollout_ref.rollout`.
        max_model_len: longest prompt plus response, in tokens.
        load_format: "auto" reads the folder's weights; "dummy" leaves them to `load_weights` (`needs_weights` is true).
        hf_overrides: values that replace those of config.json.
        in_process: see above; None decides by config.
        seed: of vLLM's own random state before the first call.
    """

    # Engines in this process share vLLM's process groups: the last to close takes them down.
    _open_in_process: ClassVar[int] = 0
    _owns_process_group: ClassVar[bool] = False

    def __init__(
        self,
        model: str | Path,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        config: RolloutConfig,
        max_model_len: int,
        load_format: str = "auto",
        hf_overrides: dict[str, Any] | None = None,
        trust_remote_code: bool = False,
        in_process: bool | None = None,
        seed: int = 0,
    ):
        setup.check_installed()
        self.device, self.dtype, self.config = torch.device(device), dtype, config
        self.max_model_len = max_model_len
        self.version, self.stats, self.log_probs_exact = 0, RolloutStats(), True
        self.load_stats: dict[str, float] = {}
        self.needs_weights = load_format == "dummy"
        one_device = config.tensor_model_parallel_size == 1
        self._in_process = one_device if in_process is None else in_process and one_device
        self._asleep: set[str] = set()
        self._calls = 0
        self._streaming = False
        self._aborted: set[int] = set()
        had_process_group = torch.distributed.is_initialized()
        kept = setup.process_settings_kept() if self._in_process else contextlib.nullcontext()
        with setup.environment(self._in_process), kept:
            setup.check_device(self.device, self._in_process)
            arguments = setup.engine_arguments(
                str(model), dtype=dtype, config=config, on_gpu=self.device.type == "cuda", max_model_len=max_model_len,
                load_format=load_format, hf_overrides=hf_overrides or {}, trust_remote_code=trust_remote_code, seed=seed,
            )  # fmt: skip
            self._engine = self._build(arguments)
            self._random_state = setup.random_state()
        if self._in_process:
            VLLMEngine._open_in_process += 1
            VLLMEngine._owns_process_group |= not had_process_group
        else:
            self._engine.collective_rpc("verl_end_with", args=(os.getpid(),))
        self._log_probs_mode = arguments.logprobs_mode
        self.sample_seeds = self.device.type == "cpu" or self._engine.vllm_config.use_v2_model_runner

    def generate(self, requests: list[Request]) -> list[list[Completion]]:
        """`sampling.n` completions for each request, in order."""
        results: list[list[Any]] = [[None] * request.sampling.n for request in requests]
        for i, j, completion in self.stream(requests):
            results[i][j] = completion
        return results

    def stream(self, requests: list[Request], feed: Feed | None = None) -> Iterator[tuple[int, int, Completion]]:
        """(request index, sample index, completion) as samples finish. feed: requests that come later join the batch.

        Leaving the loop early aborts the rest. One stream at a time.
        """
        self._check(requests)
        if feed is not None:
            self._check_length(0, feed.longest)
            self.log_probs_exact = self._exact(feed.sampling)
        self._aborted = set()
        return self._stream(requests, feed)

    def abort(self, requests: Iterable[int]) -> None:
        """Stop these requests (by index) of the stream in progress, which yields what their samples have so far."""
        self._aborted.update(requests)

    def _stream(self, requests: list[Request], feed: Feed | None) -> Iterator[tuple[int, int, Completion]]:
        self._streaming = True
        began, waited = time.perf_counter(), 0.0
        stats = RolloutStats()
        running = Running(self._engine, feed)
        try:
            self._seed(requests, feed)
            self._take_in(running, requests, stats)
            while True:
                if running.feed is not None:
                    self._take_in(running, running.more(), stats)
                if not running.samples:
                    if running.feed is None:
                        break
                    continue
                for request, sample, completion in [
                    *running.end(self._aborted, self.version),
                    *self._finished(running),
                ]:
                    check_finite(completion)
                    stats.response_tokens += len(completion.token_ids)
                    handed_over = time.perf_counter()
                    yield request, sample, completion
                    waited += time.perf_counter() - handed_over
                stats.decode_steps += 1
        finally:
            running.close()
            self._streaming = False
            # vLLM mixes prompts and decoding in one step, so all of the time is counted as decoding.
            stats.decode_seconds = time.perf_counter() - began - waited
            self.stats = stats

    def _take_in(self, running: Running, requests: list[Request], stats: RolloutStats) -> None:
        running.samples.update(self._add(requests, running.taken))
        running.taken += len(requests)
        stats.prompt_tokens += sum(len(r.prompt_ids) for r in requests)

    def _finished(self, running: Running) -> Iterator[tuple[int, int, Completion]]:
        """One step, and what it finished."""
        if not running.samples:
            return
        for output in self._step():
            if output.finished and output.request_id in running.samples:
                yield (*running.samples.pop(output.request_id), self._completion(output.outputs[0]))
        running.show()

    def prompt_log_probs(self, token_ids: list[list[int]]) -> list[list[float]]:
        """Log-probs, at temperature 1, of each sequence's tokens from the second on: a probe of the loaded weights."""
        from vllm import SamplingParams as VLLMSamplingParams

        self._check([Request(ids, SamplingParams(max_tokens=1)) for ids in token_ids])
        options = VLLMSamplingParams(
            max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False, flat_logprobs=True
        )
        names = {self._submit(ids, options): i for i, ids in enumerate(token_ids)}
        results: list[list[float]] = [[] for _ in token_ids]
        while names:
            for output in self._step():
                if output.finished:
                    # The first position has no log-prob; vLLM may list the likeliest token after the actual one.
                    log_probs = output.prompt_logprobs
                    starts = log_probs.start_indices[1:]
                    results[names.pop(output.request_id)] = [log_probs.logprobs[start] for start in starts]
        return results

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take over (Hugging Face name, tensor) pairs and forget what was computed with the old ones.

        Tied models may leave out or repeat the output layer. Raises RuntimeError with the names when parameters are
        missing. Afterwards `load_stats` holds the seconds it took, the bytes that went to another process and those of
        the bucket that they went through.
        """
        self._refuse_while_streaming("load_weights")
        if "weights" in self._asleep:
            self._wake(["weights"])
        self.needs_weights = True
        began = time.perf_counter()
        self._engine.collective_rpc("verl_begin_weights")
        sent, bucket = self._send(weights)
        missing = sorted(set().union(*self._engine.collective_rpc("verl_finish_weights")))
        if missing:
            raise RuntimeError(f"vLLM got no weights for {len(missing)} parameters: {', '.join(missing[:8])}")
        self._forget()
        self.version, self.needs_weights = version, False
        self.load_stats = {
            "seconds": time.perf_counter() - began,
            "bytes_between_processes": float(sent),
            "bucket_bytes": float(bucket),
        }

    def sleep(self) -> None:
        """Give back the memory of the KV cache and the weights (CUDA with free_cache_engine; else nothing)."""
        self._refuse_while_streaming("sleep")
        if self._asleep or self.device.type == "cpu" or not self.config.free_cache_engine:
            return
        self._forget()
        self._engine.sleep(level=2)
        self._asleep = {"weights", "kv_cache"}
        self.needs_weights = True

    def wake(self) -> None:
        """Take the memory again; the weights' content comes with `load_weights`.

        With several devices the other trainers must have given back what they do not use.
        """
        if self._asleep:
            self._wake(sorted(self._asleep))

    def close(self) -> None:
        """Stop vLLM's processes and free its memory. Closing twice does nothing."""
        if self._engine is None:
            return
        client, self._engine = self._engine.engine_core, None
        if self._in_process:
            self._close_in_process(client.engine_core)
        else:
            client.shutdown()
        del client
        gc.collect()
        torch.cuda.empty_cache()

    @staticmethod
    def _close_in_process(core: Any) -> None:
        """Everything that vLLM's own shutdown does, but for the process groups: it would destroy the trainer's too."""
        from vllm import envs
        from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

        core.structured_output_manager.clear_backend()
        core.model_executor.shutdown()
        core.scheduler.shutdown()
        gc.unfreeze()
        # Else the next engine of this process would read this one's variables.
        envs.disable_envs_cache()
        VLLMEngine._open_in_process -= 1
        if VLLMEngine._open_in_process == 0:
            destroy_model_parallel()
            if VLLMEngine._owns_process_group:
                destroy_distributed_environment()
                VLLMEngine._owns_process_group = False

    def _build(self, arguments: Any) -> Any:
        from vllm.v1.engine.llm_engine import LLMEngine
        from vllm.v1.executor import Executor

        try:
            vllm_config = arguments.create_engine_config()
        except ValueError as error:
            raise ConfigError(f"vLLM cannot run {arguments.model}: {error}") from error
        if self.device.type == "cpu":
            setup.plan_cpu(vllm_config, self.config)
        executor = Executor.get_class(vllm_config)
        engine = LLMEngine(vllm_config, executor, log_stats=False, multiprocess_mode=not self._in_process)
        if self._in_process and (finalizer := getattr(engine.engine_core, "_finalizer", None)):
            # It would run vLLM's own shutdown when the engine is collected: see `_close_in_process`.
            finalizer.detach()
        return engine

    def _check(self, requests: list[Request]) -> None:
        self._refuse_while_streaming("generate")
        if self._asleep or self.needs_weights:
            raise RuntimeError(
                "The vLLM engine has no weights or KV cache: call wake() and load_weights() before generating."
            )
        for request in requests:
            self._check_length(len(request.prompt_ids), request.sampling.max_tokens)
        self.log_probs_exact = all(self._exact(request.sampling) for request in requests)

    def _check_length(self, prompt: int, response: int) -> None:
        if prompt + response > self.max_model_len:
            raise ConfigError(
                f"A prompt of {prompt} tokens with max_tokens={response} exceeds the {self.max_model_len} tokens that "
                "vLLM was started for. Raise data.max_prompt_length or lower the number of new tokens."
            )

    def _exact(self, sampling: SamplingParams) -> bool:
        if sampling.temperature == 0.0:
            return True
        if self._log_probs_mode == "raw_logprobs":
            return sampling.temperature == 1.0
        return sampling.top_k <= 0 and sampling.top_p >= 1.0

    def _refuse_while_streaming(self, what: str) -> None:
        if self._streaming:
            raise RuntimeError(f"{what} while a stream of this engine is open: finish or close the stream first")

    def _seed(self, requests: list[Request], feed: Feed | None) -> None:
        if self.sample_seeds:
            return
        # Prompts that a former call left in the cache would change the order in which samples are drawn.
        self._forget()
        seed = mixed(*(number for r in requests for number in (r.sampling.seed, r.stream, r.sampling.n)))
        if feed is not None:  # what will come is not known
            seed = mixed(seed, feed.sampling.seed, self._calls)
        with self._own_random_state():
            self._engine.collective_rpc("verl_seed", args=(seed,))

    def _add(self, requests: list[Request], first: int) -> Iterator[tuple[str, tuple[int, int]]]:
        for i, request in enumerate(requests, start=first):
            for j in range(request.sampling.n):
                seed = mixed(request.sampling.seed, request.stream, request.first + j) if self.sample_seeds else None
                yield self._submit(request.prompt_ids, vllm_sampling(request.sampling, seed)), (i, j)

    def _submit(self, prompt_ids: list[int], options: Any) -> str:
        from vllm.inputs import tokens_input

        self._calls += 1
        name = str(self._calls)
        self._engine.add_request(name, tokens_input(prompt_ids), options)
        return name

    def _step(self) -> list[Any]:
        with self._own_random_state():
            return self._engine.step()

    def _completion(self, output: Any) -> Completion:
        return Completion(
            list(output.token_ids),
            list(output.logprobs.logprobs),
            _FINISH.get(output.finish_reason, "abort"),
            self.version,
        )

    @contextlib.contextmanager
    def _own_random_state(self) -> Iterator[None]:
        """vLLM in this process draws from torch's default random state: give it one of its own."""
        if not self._in_process:
            yield
            return
        trainers = setup.random_state()
        setup.set_random_state(self._random_state)
        try:
            yield
        finally:
            self._random_state = setup.random_state()
            setup.set_random_state(trainers)

    def _send(self, weights: Iterable[tuple[str, Tensor]]) -> tuple[int, int]:
        """Weights into the worker; returns the bytes that went through a shared bucket, and the bucket's."""
        if self._in_process:
            self._engine.collective_rpc("verl_load_weights", args=(weights,))
            return 0, 0
        size = self.config.checkpoint_engine.update_weights_bucket_megabytes << 20
        with contextlib.closing(BucketWriter(self.device, size, self.dtype)) as writer:
            deliver = lambda bucket: self._engine.collective_rpc("verl_load_bucket", args=(bucket,))  # noqa: E731
            return writer.send(weights, deliver), writer.largest

    def _forget(self) -> None:
        """Drop cached prompts. An aborted batch may still be under way: let it end."""
        for _ in range(4):
            if self._engine.reset_prefix_cache():
                return
            self._step()
        raise RuntimeError("vLLM could not clear its prefix cache: requests are still running")

    def _wake(self, tags: list[str]) -> None:
        torch.cuda.empty_cache()  # vLLM cannot use what torch holds for the trainer
        self._engine.wake_up(tags)
        self._asleep -= set(tags)
