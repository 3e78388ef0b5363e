"""The draft: a few layers between the target's embedding and those of its rows that the output keeps."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.demo_pair.model import Llama


class Draft(nn.Module):
    """Only the layers are trained: embedding, output rows and the norm before them stay the target's."""

    output_ids: Tensor
    head: Tensor

    def __init__(self, target: Llama, layers: list[int], output_ids: Tensor) -> None:
        super().__init__()
        with torch.device("meta"):
            self.net = Llama(replace(target.shape, num_hidden_layers=len(layers)))
        wanted = {"model.embed_tokens.weight": target.embedding, "model.norm.weight": target.model["norm"].weight}
        for place, layer in enumerate(layers):
            for name, weight in target.model["layers"][layer].named_parameters():  # type: ignore[index]
                wanted[f"model.layers.{place}.{name}"] = weight
        self.net.load_state_dict({n: w.detach().float().clone() for n, w in wanted.items()}, assign=True)
        self.net.cos, self.net.sin = target.cos, target.sin
        self.net.requires_grad_(True)
        self.net.embedding.requires_grad_(False)
        self.net.model["norm"].requires_grad_(False)
        self.register_buffer("output_ids", output_ids, persistent=False)
        self.register_buffer("head", target.embedding.detach()[output_ids].float(), persistent=False)

    def forward(self, ids: Tensor, texts: Tensor | None = None) -> Tensor:
        """Logits over the kept output ids."""
        return F.linear(self.net.hidden(ids, texts=texts), self.head)

    def written(self) -> dict[str, Tensor]:
        """The weights of its file, those of its layers and a copy of the target's last norm."""
        return {n: w.detach() for n, w in self.net.state_dict().items() if "embed_tokens" not in n}


@dataclass(frozen=True)
class Batch:
    """Packed sequences: (rows, length), and of every place the distribution of the token after it."""

    ids: Tensor
    texts: Tensor
    weight: Tensor
    """1 where the target wrote the token after this place, else 0."""
    top: Tensor
    """The likeliest tokens, as rows of the draft's output; -1 for those that it does not have."""
    logs: Tensor
    kind: Tensor
    """Of the place: an index of ``KINDS``, plus 3 where the text was sampled."""

    @property
    def used(self) -> Tensor:
        """Places that are learnt from."""
        return (self.weight > 0) & (self.top[..., 0] >= 0)

    def parts(self, rows: int) -> list[Batch]:
        """The batch, so many rows at a time."""
        return [Batch(*(t[i : i + rows] for t in vars(self).values())) for i in range(0, len(self.ids), rows)]

    def to(self, device: str) -> Batch:
        """The same on a device."""
        return Batch(*(t.to(device) for t in vars(self).values()))


def loss_of(draft: Draft, batch: Batch, temperature: float) -> Tensor:
    """Cross entropy with the target's distribution at a temperature, both over the draft's output tokens; the sum."""
    used = batch.used
    top, logs = batch.top[used], batch.logs[used]
    wanted = (logs / temperature).masked_fill(top < 0, -1e4).softmax(-1)
    found = F.linear(draft.net.hidden(batch.ids, texts=batch.texts)[used], draft.head).float().log_softmax(-1)
    loss: Tensor = -(wanted * found.gather(-1, top.clamp(min=0))).sum()
    return loss


@torch.no_grad()
def agreement(draft: Draft, batches: list[Batch], device: str) -> dict[int, tuple[int, int]]:
    """Per kind: at how many places both find the same token likeliest, and how many there are."""
    counts: dict[int, tuple[int, int]] = {}
    for batch in (b.to(device) for b in batches):
        with torch.autocast(device, torch.bfloat16):
            same = draft(batch.ids, batch.texts).argmax(-1) == batch.top[..., 0]
        for kind in batch.kind[batch.weight > 0].unique().tolist():
            mine = (batch.kind == kind) & (batch.weight > 0)
            a, b = counts.get(kind, (0, 0))
            counts[kind] = a + int(same[mine].sum()), b + int(mine.sum())
    return counts
