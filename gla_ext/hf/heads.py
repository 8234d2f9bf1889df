"""GLA models with a head of transformers: for classes of sequences, of tokens, and spans of text.

Arguments, results and the detection of padding are as for Llama's models: see the classes
`transformers.modeling_layers.GenericFor...`. The configuration and the constructors' errors are
those of `GLAModel`. With packed sequences, the models for classes of sequences and for spans raise
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
    """`GLAModel` and a linear map `score` from the last token of each row to `config.num_labels`.

    The last token is the last one that is not `config.pad_token_id`, for rows padded left or right.
    Without a pad token, and with inputs_embeds, it is the last one of the row.
    """

    def __init__(self, config: GLAConfig) -> None:
        super().__init__(config)
        self.model.one_sequence_a_row = True


class GLAForTokenClassification(GenericForTokenClassification, GLAPreTrainedModel):
    """`GLAModel`, dropout (0.1, or `config.classifier_dropout`) and a linear map `score` from every
    token to `config.num_labels`.
    """


class GLAForQuestionAnswering(GenericForQuestionAnswering, GLAPreTrainedModel):
    """`GLAModel` and a linear map `qa_outputs` from every token to two logits: that a span starts
    there, and that it ends there.
    """

    # transformers' own methods look for embed_tokens.
    get_input_embeddings = GLAPreTrainedModel.get_input_embeddings
    set_input_embeddings = GLAPreTrainedModel.set_input_embeddings

    def __init__(self, config: GLAConfig) -> None:
        super().__init__(config)
        self.model.one_sequence_a_row = True
