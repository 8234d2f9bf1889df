"""The blocks of a GLA language model, and GLAModel: the model except the output layer (lm_head)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gla_ext.cache import GLACache
from gla_ext.layers._history import pack, packed_slots, unpack, valid_tokens
from gla_ext.layers._options import typed_options
from gla_ext.layers._projections import add_and_norm, is_plain, lay_side_by_side, nobody_sees
from gla_ext.layers._route import project
from gla_ext.layers.attention import Attention
from gla_ext.layers.gated_linear_attention import GatedLinearAttention
from gla_ext.layers.norms import RMSNorm
from gla_ext.layers.swiglu import swiglu, swiglu_linear
from gla_ext.model.attention import ATTENTION_OPTIONS
from gla_ext.model.config import GLAConfig
from gla_ext.model.step import step_attention, step_mlp
from gla_ext.model.weights import init_weights
from gla_ext.ops._checks import check_tensors
from gla_ext.ops._context import NO_MASK, refuse_context
from gla_ext.ops.chunk import in_mode_of_now

Module = TypeVar("Module", bound=nn.Module)

# Options that a configuration and the layer call by the same name.
_LAYER_OPTIONS = ("hidden_size", "expand_k", "expand_v", "num_heads", "num_kv_heads", "feature_map")
_LAYER_OPTIONS += ("use_short_conv", "conv_size", "use_output_gate", "elementwise_affine")
_LAYER_OPTIONS += ("norm_eps", "clamp_min", "fuse_norm")


class ModelOutput(NamedTuple):
    """The result of `GLAModel`: hidden states `[B, T, hidden_size]`, and the cache or None."""

    last_hidden_state: Tensor
    past_key_values: Any | None


class GLAMLP(nn.Module):
    """SwiGLU: `down_proj(swish(gate_proj(x)) * up_proj(x))` (Shazeer, 2020, arXiv:2002.05202).

    The product is rounded once. Autograd saves gate and up; backward computes the product again.

    Args:
        hidden_size: width of the input and the output.
        intermediate_size: width in between.
    """

    @typed_options
    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = project(x, [self.gate_proj, self.up_proj], together=False)
        if is_plain(self.down_proj):
            return swiglu_linear(gate, up, self.down_proj.weight)
        return self.down_proj(swiglu(gate, up))

    def fuse_projections(self) -> None:
        """See `gla_ext.model.fuse_projections`."""
        lay_side_by_side([self.gate_proj, self.up_proj])


def gla_options(config: GLAConfig) -> dict[str, Any]:
    """The options of a model's `GatedLinearAttention` layers."""
    options = {name: getattr(config, name) for name in _LAYER_OPTIONS}
    return options | {"mode": config.attn_mode, "gate_fn": config.hidden_act}


def _token_mixer(config: GLAConfig, layer_idx: int) -> GatedLinearAttention | Attention:
    """The layer that mixes a block's tokens: attention if config.attn lists the block, else GLA."""
    spec = config.attention_of(layer_idx)
    if spec is not None:
        options = {name: spec[name] for name in ATTENTION_OPTIONS}
        return Attention(config.hidden_size, layer_idx=layer_idx, **options)
    return GatedLinearAttention(layer_idx=layer_idx, **gla_options(config))


class GLABlock(nn.Module):
    """Pre-norm block: `x = x + attn(attn_norm(x))`, then `x = x + mlp(mlp_norm(x))`.

    Args:
        config: the model's configuration.
        layer_idx: index of the block, also the index of its state in a cache.
    """

    def __init__(self, config: GLAConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.fuse_norm = config.fuse_norm
        self.attn_norm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.attn = _token_mixer(config, layer_idx)
        self.mlp_norm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = GLAMLP(config.hidden_size, config.mlp_size)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        prenorm: bool = False,
        follows_step: bool = False,
        **attn_args: Any,
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """x `[B, T, hidden_size]`. attn_args are passed to `attn.forward`; attn is a
        `GatedLinearAttention` or, in some blocks of a hybrid model, an `Attention`.

        A sum with the residual is computed inside the norm after it. If a residual is given, x is
        first added to it. With prenorm, the MLP's output and its residual are returned separately,
        for the next norm to add. The few kernels that decode a token, see `gla_ext.model.step`,
        compute the sums themselves: the returned residual is then None, and the next block gets
        follows_step = True.
        """
        y = None
        if self.fuse_norm:
            norm, layer = self.attn_norm, self.attn
            y = step_attention(norm, layer, x, residual, follows_step, **attn_args)
        if y is not None:
            x, residual = y, None
        else:
            y, residual = add_and_norm(self.attn_norm, x, residual, self.fuse_norm)
            x = self.attn(y, **attn_args)[0]
        if self.fuse_norm and type(self.mlp) is GLAMLP:
            y = step_mlp(self.mlp_norm, self.mlp, x, residual)
            if y is not None:
                return (y, None) if prenorm else y
        y, residual = add_and_norm(self.mlp_norm, x, residual, self.fuse_norm)
        x = self.mlp(y)
        return (x, residual) if prenorm else residual + x


class GLAModel(nn.Module):
    """Embeddings, blocks and a last norm.

    Set `gradient_checkpointing` to recompute each block in backward instead of saving its
    activations (training without a cache only). Default: False.

    Args:
        config: the configuration.
    """

    def __init__(self, config: GLAConfig) -> None:
        super().__init__()
        self.config = config
        self.gradient_checkpointing = False
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(GLABlock(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialises every weight inside by the configuration. Call it last, after `to_empty()`.

        The submodules have their own reset_parameters, which use torch's distributions.
        """
        init_weights(self, self.config.initializer_range)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any | None = None,
        use_cache: bool = False,
        cu_seqlens: Tensor | None = None,
        cp_context: Any = None,
    ) -> ModelOutput:
        """Arguments are those of `GLAForCausalLM.forward`."""
        check_tensors("GLAForCausalLM", "input_ids cu_seqlens", input_ids, cu_seqlens)
        if use_cache and past_key_values is None:
            past_key_values = GLACache()
        recompute = self.gradient_checkpointing and self.training and past_key_values is None
        x = run_blocks(
            self.layers,
            self.embeddings(input_ids),
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            use_cache=use_cache,
            cu_seqlens=cu_seqlens,
            cp_context=cp_context,
            call=_checkpointed if recompute else GLABlock.__call__,
            norm=self.norm,
        )
        return ModelOutput(x, past_key_values)


def run_blocks(
    blocks: Iterable[GLABlock],
    x: Tensor,
    *,
    attention_mask: Tensor | None = None,
    past_key_values: Any | None = None,
    use_cache: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_context: Any = None,
    slots: Tensor | None = None,
    max_seqlen: int | None = None,
    call: Callable[..., Tensor] = GLABlock.__call__,
    inputs: list[Tensor] | None = None,
    norm: nn.Module | None = None,
) -> Tensor:
    """Passes tokens through a stack of blocks.

    With a mask, tokens are packed in one row, padding last. They are packed once, not in every
    block, and no block computes with a mask.

    Args:
        blocks: the blocks, first to last.
        x: the embeddings, `[B, T, hidden_size]`.
        attention_mask, past_key_values, use_cache, cu_seqlens, cp_context: as in
            `GLAForCausalLM.forward`; if cu_seqlens is given, the mask is ignored.
        slots: int64 `[B * T]`, the places of the tokens in the packed row to which cu_seqlens
            refers; see `gla_ext.layers._history.packed_slots`. Default: None (x is that row).
        max_seqlen: as in `Attention.forward`. Default: None.
        call: runs a block on x, optionally a residual, and keywords. Default: the block itself.
        inputs: list to which the input of every block is appended, `[B, T, hidden_size]`.
            Default: None.
        norm: norm to apply to the last block's output. Default: None.

    Returns:
        The output of the last block or of the norm, `[B, T, hidden_size]`. For a padded token,
        attention layers add 0, and MLPs and norms process it like any other token.

    Raises:
        ValueError: for tokens of another shape.
    """
    if x.ndim != 3:
        raise ValueError(f"GLAModel: expected tokens of shape [B, T], got {list(x.shape[:-1])}")
    B, T, _ = x.shape
    if attention_mask is not None:
        refuse_context(cp_context, f"GLAModel: {NO_MASK}")
    if attention_mask is not None and cu_seqlens is None:
        slots, cu_seqlens = packed_slots(valid_tokens(attention_mask, B, T))
        max_seqlen = T
    if slots is not None:
        x = pack(x, slots)
    attn_args = {
        "past_key_values": past_key_values,
        "use_cache": use_cache,
        "cu_seqlens": cu_seqlens,
        "max_seqlen": max_seqlen,
        "cp_context": cp_context,
    }
    # The sum at a block's end is computed by the norm at the start of the next block.
    blocks, residual, follows_step = list(blocks), None, False
    carries = inputs is None and all(
        type(block) is GLABlock and block.fuse_norm and nobody_sees(block) for block in blocks
    )
    for block in blocks:
        if inputs is not None:
            inputs.append(x if slots is None else unpack(x, slots, B, T))
            x = x if slots is None else pack(inputs[-1], slots)  # so that gradients pass through it
        if not carries:
            x = call(block, x, **attn_args)
        elif residual is None:
            x, residual = call(block, x, prenorm=True, follows_step=follows_step, **attn_args)
            follows_step = residual is None
        else:
            x, residual = call(block, x, residual, prenorm=True, **attn_args)
    if norm is not None:
        x = add_and_norm(norm, x, residual, carries)[0]
    elif residual is not None:
        x = residual + x
    if slots is None:
        return x
    if past_key_values is not None:
        for layer_idx in range(len(past_key_values)):  # each counted B * T tokens
            past_key_values.update(layer_idx=layer_idx, offset=T - B * T)
    return unpack(x, slots, B, T)


def _checkpointed(block: GLABlock, *x: Tensor, **attn_args: Any) -> Any:
    return checkpoint(in_mode_of_now(block), *x, use_reentrant=False, **attn_args)


def fuse_projections(module: Module) -> Module:
    """Lets inference use one matrix product where a layer has several linear maps of one input: q,
    k, v, the output gate and the gate's first map of a `GatedLinearAttention`; q, k and v of an
    `Attention` without biases; gate and up of a `GLAMLP`.

    A token step consists mostly of such products, each too small to fill a GPU, unless the kernels
    of `gla_ext.model.step` run it, as they do on a GPU for up to 32 rows in bf16 or fp16. More than
    256 tokens of a batch still use separate products.

    The weights are made adjacent in memory, once. They stay the same parameters with the same
    names, can be changed in place, trained and saved, and are not duplicated. Call this last: if
    something moves or replaces the parameters (`model.to(...)`), they are separate again and only
    the speed is lost. Code that holds their address, such as a CUDA graph, would read freed memory,
    so capture graphs afterwards. safetensors' `save_model` rejects parameters that share a storage;
    pass it a `copy.deepcopy(module)`, in which they are separate. Its `save_file`, `torch.save` of
    a whole state_dict and `save_pretrained` accept them. Results may differ by rounding.

    Nothing changes with gradients; when compiled or traced; in `batch_invariant`; where autocast
    caches its casts of the weights; or where a linear map has a hook, an adapter or a quantized or
    sharded weight.

    Args:
        module: any module, at any depth: a `GLAForCausalLM`, a model of `gla_ext.hf`, a layer.

    Returns:
        The module.
    """
    for child in module.modules():
        if isinstance(child, (Attention, GatedLinearAttention, GLAMLP)):
            child.fuse_projections()
    return module
