"""The two modules that train: a policy that gives log-probs, a value model that gives values, both on packed tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from verl.core.model_engine import attention
from verl.core.model_engine.chunked_head import linear_log_probs, linear_statistics
from verl.core.model_engine.packing import PackedInputs
from verl.core.model_engine.sequence_parallel import SequenceGroup, SequencePart
from verl.errors import ConfigError

_LOGIT_TRANSFORMS = ("final_logit_softcapping", "logit_scale", "logits_scaling")


def check_plain_head(config) -> None:
    """Raise ConfigError for a model whose logits are more than hidden @ weight.T."""
    changed = [k for k in _LOGIT_TRANSFORMS if getattr(config, k, None) not in (None, 1, 1.0)]
    if changed:
        raise ConfigError(
            f"actor_rollout_ref.model.path: {config.model_type} models change their logits ({', '.join(changed)}), which "
            "this trainer does not do. Use a model without it, such as Qwen2, Qwen3, Llama or Mistral."
        )


class _Packed(nn.Module):
    """Holds a Hugging Face model under `hf`; parameter names are the checkpoint's behind the prefix "hf.".

    sequence: the ranks that share each micro-batch's tokens; None: each rank has micro-batches of its own.
    """

    sequence: SequenceGroup | None = None

    def __init__(self, hf: nn.Module):
        super().__init__()
        if hf.config._attn_implementation != attention.NAME:
            raise ValueError(
                f"load the model with attn_implementation='{attention.NAME}', not '{hf.config._attn_implementation}'"
            )
        self.hf = hf

    def part_of(self, inputs: PackedInputs) -> SequencePart | None:
        """This rank's part of the inputs; None where it computes all of them."""
        return None if self.sequence is None else self.sequence.part(inputs)

    def hidden_states(self, inputs: PackedInputs, part: SequencePart | None) -> Tensor:
        """Final hidden state that predicts each response token (of the part): [N, H]."""
        own = inputs if part is None else part
        out = self.hf.base_model(
            input_ids=own.input_ids[None],
            position_ids=own.position_ids[None],
            use_cache=False,
            packing=inputs.layout,
            **({} if part is None else {"part": part}),
        )
        return out.last_hidden_state.squeeze(0).index_select(0, own.target_positions)


class PolicyModel(_Packed):
    """A causal language model that returns log-probs of the response tokens."""

    def __init__(self, hf: nn.Module, *, compiled: bool = False):
        super().__init__(hf)
        check_plain_head(hf.config)
        self.compiled = compiled

    def forward(
        self, inputs: PackedInputs, temperature: float, with_entropy: bool, with_squares: bool = False
    ) -> tuple[Tensor, ...]:
        """(log_probs, entropy) of the N response tokens at `temperature`: float32 [N] each.

        with_squares: the sums of squared probabilities are a third, and there are no gradients.
        """
        head = self.hf.get_output_embeddings()
        if head.bias is not None:
            raise ConfigError(
                f"{self.hf.config.model_type} models have a bias in their output layer, which is not supported."
            )
        part = self.part_of(inputs)
        labels = inputs.labels if part is None else part.labels
        operands = (self.hidden_states(inputs, part), head.weight, labels, temperature)
        compiled = self.compiled and inputs.labels.is_cuda
        if with_squares:
            results: tuple[Tensor, ...] = linear_statistics(*operands, compiled=compiled)
        else:
            results = linear_log_probs(*operands, with_entropy=with_entropy, compiled=compiled)
        return results if part is None else part.all_targets(torch.stack(results, dim=1)).unbind(1)


class ValueModel(_Packed):
    """A token-classification model with one label: the value of the state before each response token."""

    def forward(self, inputs: PackedInputs) -> Tensor:
        """Values, float32 [N]."""
        part = self.part_of(inputs)
        values = self.hf.score(self.hidden_states(inputs, part)).float().sum(-1)  # a sum, since FSDP2 warns of views
        return values if part is None else part.all_targets(values)
