"""The algorithms, as pure functions of tensors: they import torch alone and know no model, file or config.

Batches are flat. A token tensor has shape [N]: the response tokens of B samples end to end, with `lengths` (int64 [B],
on the CPU) saying where each ends, and `mask` (bool [N]) saying which tokens the policy chose. Tool and observation
tokens are False in it: they carry no loss, no advantage and no reward, and recursions step over them.

- `registry`: every advantage estimator and policy loss by name, with its paper and what it needs
- `advantages`, `policy_losses`: the estimators and losses
- `aggregate`: per-token weights that make a loss the same for every split into micro-batches and ranks
- `kl`, `value_loss`, `correction`, `filtering`: the rest of the loss; `segments`: sums and scans over samples
"""
