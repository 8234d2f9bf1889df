"""The language model: its configuration, blocks, loss, and files."""

from gla_ext.model.blocks import (
    GLAMLP,
    GLABlock,
    GLAModel,
    ModelOutput,
    fuse_projections,
    run_blocks,
)
from gla_ext.model.causal_lm import CausalLMOutput, GLAForCausalLM, check_logits_to_keep
from gla_ext.model.config import GLAConfig
from gla_ext.model.loss import next_token_loss
from gla_ext.model.weights import count_parameters, init_weights

__all__ = [
    "GLAMLP",
    "CausalLMOutput",
    "GLABlock",
    "GLAConfig",
    "GLAForCausalLM",
    "GLAModel",
    "ModelOutput",
    "check_logits_to_keep",
    "count_parameters",
    "fuse_projections",
    "init_weights",
    "next_token_loss",
    "run_blocks",
]
