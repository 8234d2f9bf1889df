"""The configuration of a GLA language model, under the names of FLA's `GLAConfig`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from gla_ext.layers._options import check_sizes, typed
from gla_ext.model.attention import Spec, attention_of, read_attn
from gla_ext.model.files import read_json, write_text
from gla_ext.model.legacy import modern_options

# Options of FLA's configuration files that have no effect in FLA either: the value that is
# accepted, and the reason why other values are rejected.
_LEADS_NOWHERE: dict[str, tuple[Any, str]] = {
    "use_gk": (True, "no code of FLA's reads it, and its layer has this gate with either value"),
    "use_gv": (False, "no code of FLA's reads it; gla_ext.chunk_gla(..., gv=) has such a gate"),
}

# Options of FLA that no published GLA checkpoint sets: the only value that is accepted.
_ONLY: dict[str, Any] = {"fuse_swiglu": True, "use_l2warp": False, "attnres_block_size": None}

_SIZES = ("hidden_size", "num_hidden_layers", "num_heads", "conv_size", "vocab_size")
_SIZES += ("intermediate_size", "num_kv_heads")


@dataclass
class GLAConfig:
    """The configuration of a `GLAForCausalLM`; names and defaults are those of FLA 0.6.0.

    Args:
        hidden_size: width of the residual stream. Default: 2048.
        expand_k: key width over hidden_size. Default: 0.5.
        expand_v: value width over hidden_size. Default: 1.0.
        hidden_ratio: if intermediate_size is None, the MLP has width 2/3 * hidden_ratio *
            hidden_size, rounded up to a multiple of 256. Default: 4.
        intermediate_size: width of the MLP. Default: None.
        num_hidden_layers: number of blocks. Default: 24.
        num_heads: heads per layer. Default: 4.
        num_kv_heads, feature_map, attn_mode, use_short_conv, conv_size, use_output_gate, clamp_min:
            see `GatedLinearAttention`, where attn_mode is `mode`. Defaults: None, None, 'chunk',
            False, 4, True, None.
        hidden_act: activation of the MLP and of the output gate. 'swish' is the only one that both
            FLA's MLP and its layer accept. 'silu' is the same function, but names the layers' norms
            `g_norm`, see fuse_norm of `GatedLinearAttention`. Default: 'swish'.
        max_position_embeddings: stored for FLA only; there is no limit here. Default: 2048.
        elementwise_affine: whether the layers' norms have a weight. Default: True.
        norm_eps: epsilon of all norms. Default: 1e-6.
        attn: the blocks that have `gla_ext.layers.attention.Attention` instead of GLA: a dict with
            `layers` (their indices), `num_heads`, and optionally `num_kv_heads` (num_heads),
            `qkv_bias` (False), `window_size` (None) and `rope_theta` (10000), or a list of such
            dicts. Other keys are kept unread. Default: None (no block).
        use_cache: stored for FLA only; here forward's own argument decides. Default: True.
        pad_token_id: token whose embedding gets no gradient. Default: None.
        bos_token_id: first token of a sequence. Default: 1.
        eos_token_id: last token of a sequence, or a list of such tokens. Default: 2.
        tie_word_embeddings: the output matrix is the embedding matrix. Default: False.
        initializer_range: standard deviation of the initial weights. Default: 0.02.
        fuse_norm: see `GatedLinearAttention`; also, the norms of the blocks add the residual stream
            inside their kernels. Default: True.
        fuse_cross_entropy: compute the loss by one operator, which makes no wider copy of the
            logits, instead of torch's operations. Default: True.
        fuse_linear_cross_entropy: compute the output layer and the loss by one operator. The logits
            are never in memory all at once, and none are returned with labels. Default: False.
        fuse_swiglu, use_l2warp, attnres_block_size: only the defaults True, False and None.
        vocab_size: number of tokens. Default: 32000.

    Raises:
        ValueError: both fuse_cross_entropy and fuse_linear_cross_entropy; sizes and numbers of
            heads below 1; a hidden_ratio that makes the MLP's width 0; a pad_token_id that is no
            token; another value for an option that has only one.
        TypeError: a field of a type other than listed above.
        NotImplementedError: hidden_act other than 'swish' and 'silu'; qk_norm in attn.
    """

    hidden_size: int = 2048
    expand_k: float = 0.5
    expand_v: float = 1.0
    hidden_ratio: float | None = 4
    intermediate_size: int | None = None
    num_hidden_layers: int = 24
    num_heads: int = 4
    num_kv_heads: int | None = None
    feature_map: str | None = None
    attn_mode: str = "chunk"
    use_short_conv: bool = False
    conv_size: int = 4
    use_output_gate: bool = True
    clamp_min: float | None = None
    hidden_act: str = "swish"
    max_position_embeddings: int = 2048
    elementwise_affine: bool | None = True
    norm_eps: float = 1e-6
    attn: Spec | list[Spec] | None = None
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    fuse_norm: bool = True
    fuse_cross_entropy: bool = True
    fuse_linear_cross_entropy: bool = False
    fuse_swiglu: bool = True
    use_l2warp: bool = False
    vocab_size: int = 32000
    attnres_block_size: int | None = None

    def __post_init__(self) -> None:
        annotations = {field.name: field.type for field in fields(self)}
        for name, value in typed("GLAConfig", vars(self), annotations).items():
            setattr(self, name, value)
        for name, value in _ONLY.items():
            if getattr(self, name) is not value:
                raise ValueError(
                    f"GLAConfig: expected {name} to be {value}, the only value that is supported, "
                    f"got {getattr(self, name)}"
                )
        if self.hidden_act not in ("silu", "swish"):
            why = "; FLA's layer cannot be built with it" if self.hidden_act == "powlu" else ""
            raise NotImplementedError(
                f"GLAConfig: hidden_act = {self.hidden_act!r} is not implemented, only 'swish' and "
                f"'silu', its other name, are{why}"
            )
        if self.fuse_cross_entropy and self.fuse_linear_cross_entropy:
            raise ValueError(
                "GLAConfig: expected at most one of fuse_cross_entropy and "
                "fuse_linear_cross_entropy to be True, got both"
            )
        sizes = {name: getattr(self, name) for name in _SIZES}
        check_sizes("GLAConfig", **{name: size for name, size in sizes.items() if size is not None})
        if self.mlp_size < 1:
            raise ValueError(
                "GLAConfig: expected hidden_ratio to make the MLP at least 1 wide, got "
                f"{self.hidden_ratio} with hidden_size = {self.hidden_size}"
            )
        self.attn = read_attn(self.attn, self.num_hidden_layers)
        # A negative token counts from the end, as in nn.Embedding.
        pad, V = self.pad_token_id, self.vocab_size
        if pad is not None and not -V <= pad < V:
            raise ValueError(
                f"GLAConfig: expected pad_token_id to be one of vocab_size = {V} tokens, got {pad}"
            )

    @property
    def mlp_size(self) -> int:
        """Width of the MLP: intermediate_size, or the width given by hidden_ratio."""
        if self.intermediate_size is not None:
            return self.intermediate_size
        ratio = 4 if self.hidden_ratio is None else self.hidden_ratio
        return -(-int(self.hidden_size * ratio * 2 / 3) // 256) * 256

    def attention_of(self, layer_idx: int) -> Spec | None:
        """A block's entry of attn, with its defaults; None for a block of GLA."""
        return attention_of(self.attn, layer_idx)

    def to_dict(self) -> dict[str, Any]:
        """The fields, and the two entries by which FLA and transformers recognize the model."""
        return {"model_type": "gla", "architectures": ["GLAForCausalLM"], **asdict(self)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> GLAConfig:
        """Reads the form that `to_dict` returns, or a config.json that FLA wrote, also in 2024.

        Entries that are neither fields here nor known options of FLA are ignored.

        Raises:
            ValueError: for a model_type other than 'gla'.
            NotImplementedError: for FLA's options use_gk and use_gv, which have no effect there,
                and for share_conv_kernel, which FLA had until 2024.
        """
        if values.get("model_type", "gla") != "gla":
            raise ValueError(
                f"GLAConfig: expected model_type to be 'gla', got {values['model_type']!r}"
            )
        for name, (harmless, why) in _LEADS_NOWHERE.items():
            if name in values and values[name] is not harmless:
                raise NotImplementedError(
                    f"GLAConfig: {name} = {values[name]!r} is not implemented: {why}"
                )
        values = modern_options(values)
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})

    def save(self, path: str | Path) -> None:
        """Writes the configuration as JSON to the file `path`."""
        write_text(path, json.dumps(self.to_dict(), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> GLAConfig:
        """Reads the file `path`. Raises the errors of `from_dict`, but ValueError instead of
        TypeError, and ValueError if the file is not JSON.
        """
        values = read_json(path, "GLAConfig: ")
        try:
            return cls.from_dict(values)
        except TypeError as error:
            raise ValueError(f"{error} in {path}") from error
