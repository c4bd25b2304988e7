"""Sequence parallelism: several ranks split the tokens of a sample, and each computes all of them for some heads.

Jacobs et al., "DeepSpeed Ulysses", arXiv:2309.14509. Between attentions a rank holds its share of the text and of the
image tokens. For attention the ranks exchange shares of tokens for shares of heads and back, which moves
4 x tokens x width / ranks elements a block and rank, whatever the number of ranks.

What is split and where it is gathered is diffusers' own plan for the model (`_cp_plan`). Three things are done here
that diffusers does in a way made for inference:

- Shares may differ by one token. Diffusers wants lengths that divide (its variant for any length has no backward
  pass). Padding instead would need masks, which exclude the fast attention kernels.
- Attention stays an ordinary differentiable operation, of any backend. Diffusers' own has a few, and computes
  PyTorch's once more in every backward pass.
- Gathering has its true adjoint. Every rank of a group has the same loss and is to propagate 1 / ranks of it back; then
  the gradients of *all* parameters, in front of, between and behind the split parts, add up over all ranks to those of
  the loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from diffusers import QwenImageTransformer2DModel
from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.attention_processor import Attention
from diffusers.models.transformers.transformer_qwenimage import apply_rotary_emb_qwen

from qwen_edit_zero.errors import SettingsError

_MASK = "encoder_hidden_states_mask"


def check_heads(size: int, heads: int) -> None:
    """Raise SettingsError unless `size` ranks can share `heads` attention heads evenly."""
    if heads % size:
        fitting = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise SettingsError(
            f"engine.sequence_parallel is {size}, but the model has {heads} attention heads, which {size} ranks cannot "
            f"share evenly. Sizes that fit: {fitting}."
        )


def split_sequences(transformer: QwenImageTransformer2DModel, group: dist.ProcessGroup) -> None:
    """Let the ranks of `group` compute each forward and backward of `transformer` together, in place.

    All of them must call it with the same inputs, get the same, whole output, and propagate 1 / ranks of the loss back.
    To be called before an engine wraps the module; changes no parameter.

    Raises SettingsError if the number of attention heads does not divide by that of the ranks.
    """
    check_heads(dist.get_world_size(group), int(transformer.config.num_attention_heads))
    shares = _Shares(group)
    transformer.pos_embed.register_forward_hook(lambda module, args, output: shares.note(*map(len, output)))
    for path, entry in transformer._cp_plan.items():
        for module in _at(transformer, path):
            if isinstance(entry, ContextParallelOutput):
                module.register_forward_hook(_gathering(shares, entry.gather_dim))
            else:
                module.register_forward_pre_hook(_splitting_inputs(shares, entry), with_kwargs=True)
                module.register_forward_hook(_splitting_outputs(shares, entry))
    for block in transformer.transformer_blocks:
        block.attn.set_processor(UlyssesAttnProcessor(shares, block.attn.processor._attention_backend))


class _Shares:
    """How many tokens each rank of the group has in the forward that is going on."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.image: list[int] = []
        self.text: list[int] = []

    def note(self, image_tokens: int, text_tokens: int) -> None:
        if min(image_tokens, text_tokens) < self.ranks:
            raise SettingsError(
                f"engine.sequence_parallel is {self.ranks}, but a sample has {image_tokens} image and {text_tokens} "
                f"text tokens, and every rank needs some of both. Sequences this short are not worth splitting: use 1."
            )
        self.image, self.text = self._lengths(image_tokens), self._lengths(text_tokens)

    def _lengths(self, total: int) -> list[int]:
        """As `torch.tensor_split` cuts."""
        return [total // self.ranks + (rank < total % self.ranks) for rank in range(self.ranks)]

    def own(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's share of `tensor` along `dim`."""
        return tensor.tensor_split(self.ranks, dim)[self.rank]


def _at(transformer: torch.nn.Module, path: str) -> list[torch.nn.Module]:
    """The modules that a path of the plan means; it may end in `*`, all members of a list."""
    if path.endswith(".*"):
        return list(transformer.get_submodule(path.removesuffix(".*")).children())
    return [transformer.get_submodule(path)]


def _splitting_inputs(shares: _Shares, plan: Mapping[Any, ContextParallelInput]) -> Any:
    # The mask stays whole: every rank attends to all tokens.
    split = {name: entry for name, entry in plan.items() if not entry.split_output and name != _MASK}

    def hook(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
        assert split.keys() <= kwargs.keys(), f"{sorted(split)} are passed by name"
        own = {name: kwargs[name] for name in split if kwargs[name] is not None}
        return args, kwargs | {name: shares.own(tensor, split[name].split_dim) for name, tensor in own.items()}

    return hook


def _splitting_outputs(shares: _Shares, plan: Mapping[Any, ContextParallelInput]) -> Any:
    split = {index: entry for index, entry in plan.items() if entry.split_output}

    def hook(_: torch.nn.Module, args: tuple[Any, ...], outputs: tuple[torch.Tensor, ...]) -> Any:
        if not split:
            return outputs
        return tuple(
            shares.own(output, split[index].split_dim) if index in split else output
            for index, output in enumerate(outputs)
        )

    return hook


def _gathering(shares: _Shares, dim: int) -> Any:
    def hook(_: torch.nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        whole: torch.Tensor = _Gather.apply(output, dim, shares.image, shares.rank, shares.group)  # type: ignore[no-untyped-call]
        return whole

    return hook


class _Gather(torch.autograd.Function):
    """Shares of a dimension -> the whole of it on every rank."""

    @staticmethod
    def forward(
        ctx: Any, share: torch.Tensor, dim: int, lengths: Sequence[int], rank: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.dim, ctx.lengths, ctx.rank = dim, list(lengths), rank
        assert share.shape[dim] == lengths[rank]
        shape = list(share.shape)
        shape[dim] = max(lengths)  # collectives want equal sizes
        padded = share.new_zeros(shape)
        padded.narrow(dim, 0, lengths[rank]).copy_(share)
        gathered = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(gathered, padded, group=group)
        return torch.cat([part.narrow(dim, 0, n) for part, n in zip(gathered, lengths, strict=True)], dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # The sum over the ranks' gradients, which are equal, since all ranks go on to compute the same from the whole.
        own = gradient.tensor_split(len(ctx.lengths), ctx.dim)[ctx.rank]
        return own * len(ctx.lengths), None, None, None, None


class UlyssesAttnProcessor:
    """Joint attention as in diffusers' `QwenDoubleStreamAttnProcessor2_0`, from and to this rank's tokens of both."""

    def __init__(self, shares: _Shares, backend: Any) -> None:
        self._shares = shares
        self._attention_backend = backend

    def __call__(
        self,
        attn: Attention,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        encoder_hidden_states_mask: torch.Tensor | None = None,
        attention_mask: None = None,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(B, own image tokens, width), (B, own text tokens, width) -> the same; the mask is (B, all text tokens)."""
        assert attention_mask is None
        assert image_rotary_emb is not None
        image_rope, text_rope = image_rotary_emb
        to_image, to_text = (attn.to_q, attn.to_k, attn.to_v), (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
        image = _project(hidden_states, to_image, (attn.norm_q, attn.norm_k), image_rope, attn.heads)
        text = _project(encoder_hidden_states, to_text, (attn.norm_added_q, attn.norm_added_k), text_rope, attn.heads)
        joint = [torch.cat(pair, dim=1) for pair in zip(text, image, strict=True)]
        del image, text  # attention is where most memory is in use, and backward needs neither these nor `joint`
        attended = self._attend(joint, encoder_hidden_states_mask)
        attended, text_tokens = attended.flatten(2).to(hidden_states.dtype), encoder_hidden_states.shape[1]
        text_out, image_out = attended[:, :text_tokens], attended[:, text_tokens:]
        for layer in attn.to_out:
            image_out = layer(image_out)
        return image_out, attn.to_add_out(text_out)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # compiled communication would be built for one length
    def _attend(self, query_key_value: list[torch.Tensor], text_mask: torch.Tensor | None) -> torch.Tensor:
        """Three (B, own tokens, heads, head width) -> the attention's result for own tokens, of that shape.

        The list is emptied, so that what was sent is freed before attention.
        """
        shares = self._shares
        lengths = [text + image for text, image in zip(shares.text, shares.image, strict=True)]
        own = query_key_value[0].shape[1]
        # Recomputing a block after a forward of another size would come to this.
        assert own == lengths[shares.rank], f"{own} tokens here, but the shares are {lengths}"
        query, key, value = _tokens_to_heads(query_key_value, lengths, shares).unbind(1)
        attended = dispatch_attention_fn(
            query.transpose(0, 1),
            key.transpose(0, 1),
            value.transpose(0, 1),
            attn_mask=None if text_mask is None else self._joint_mask(text_mask),
            backend=self._attention_backend,
        )
        return _heads_to_tokens(attended, lengths, shares)

    def _joint_mask(self, text_mask: torch.Tensor) -> torch.Tensor:
        """(B, 1, 1, all tokens), in the order of exchanged tokens: text and image of the first rank, then the next."""
        pieces = []
        text = text_mask.tensor_split(self._shares.ranks, 1)
        for part, image_tokens in zip(text, self._shares.image, strict=True):
            pieces += [part, part.new_ones(part.shape[0], image_tokens)]
        return torch.cat(pieces, dim=1)[:, None, None]


def _project(
    states: torch.Tensor,
    projections: Sequence[torch.nn.Module],
    norms: Sequence[torch.nn.Module],
    rope: torch.Tensor,
    heads: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value (B, tokens, heads, head width) of one stream."""
    query, key, value = (project(states).view(*states.shape[:2], heads, -1) for project in projections)
    # Under autocast, norms that train return fp32: the exchange would move twice the bytes.
    query, key = (
        apply_rotary_emb_qwen(norm(tensor), rope, use_real=False).to(value.dtype)
        for tensor, norm in zip((query, key), norms, strict=True)
    )
    return query, key, value


def _tokens_to_heads(tensors: list[torch.Tensor], lengths: list[int], shares: _Shares) -> torch.Tensor:
    """n tensors (B, own tokens, heads, width) -> (all tokens, n, B, own heads, width). Empties the list."""
    batch, own, heads, width = tensors[0].shape
    by_rank = [
        t.reshape(batch, own, shares.ranks, heads // shares.ranks, width).permute(2, 1, 0, 3, 4) for t in tensors
    ]
    sent = torch.stack(by_rank, dim=2).flatten(0, 1)
    tensors.clear()
    del by_rank
    return _exchange(sent, [own] * shares.ranks, lengths, shares.group)


def _heads_to_tokens(tensor: torch.Tensor, lengths: list[int], shares: _Shares) -> torch.Tensor:
    """(B, all tokens, own heads, width) -> (B, own tokens, heads, width)."""
    batch, _, heads, width = tensor.shape
    own = lengths[shares.rank]
    back = _exchange(tensor.transpose(0, 1).contiguous(), lengths, [own] * shares.ranks, shares.group)
    return back.view(shares.ranks, own, batch, heads, width).permute(2, 1, 0, 3, 4).flatten(2, 3)


def _exchange(
    tensor: torch.Tensor, sends: Sequence[int], receives: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Send `sends[i]` rows of the contiguous `tensor` to rank i, in order; `receives[i]` rows come from it."""
    received: torch.Tensor = _Exchange.apply(tensor, sends, receives, group)  # type: ignore[no-untyped-call]
    return received


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, sends: Sequence[int], receives: Sequence[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.sends, ctx.receives, ctx.group = list(sends), list(receives), group
        received = tensor.new_empty(sum(receives), *tensor.shape[1:])
        dist.all_to_all_single(received, tensor, ctx.receives, ctx.sends, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _exchange(gradient.contiguous(), ctx.receives, ctx.sends, ctx.group), None, None, None
