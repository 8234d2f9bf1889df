"""GLA models with a head of transformers': classes of sequences, of tokens, and spans of text.

What they take and return, and how padding is found, is as for Llama's: see the classes
`transformers.modeling_layers.GenericFor...`. The configuration is as `GLAModel`'s, and so is what
the constructors raise. Of packed sequences those of classes of sequences and of spans raise
NotImplementedError in forward.
"""

from __future__ import annotations

from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
)

from gla_ext.hf.configuration import GLAConfig
from gla_ext.hf.modeling import GLAPreTrainedModel


class GLAForSequenceClassification(GenericForSequenceClassification, GLAPreTrainedModel):
    """`GLAModel` and a linear map `score` of the last token of each row to `config.num_labels`.

    The last token is the last that is not `config.pad_token_id`, of rows padded left or right;
    without a pad token, and with inputs_embeds, it is that of the row.
    """

    def __init__(self, config: GLAConfig) -> None:
        super().__init__(config)
        self.model.one_sequence_a_row = True


class GLAForTokenClassification(GenericForTokenClassification, GLAPreTrainedModel):
    """`GLAModel`, dropout (0.1, or `config.classifier_dropout`) and a linear map `score` of every
    token to `config.num_labels`.
    """


class GLAForQuestionAnswering(GenericForQuestionAnswering, GLAPreTrainedModel):
    """`GLAModel` and a linear map `qa_outputs` of every token to two logits: that a span starts and
    that it ends there.
    """

    # transformers' look for embed_tokens.
    get_input_embeddings = GLAPreTrainedModel.get_input_embeddings
    set_input_embeddings = GLAPreTrainedModel.set_input_embeddings

    def __init__(self, config: GLAConfig) -> None:
        super().__init__(config)
        self.model.one_sequence_a_row = True
