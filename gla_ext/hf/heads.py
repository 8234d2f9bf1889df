"""GLA models with a head of transformers': classes of sequences, of tokens, and spans of text.

What they take and return, and how padding is found, is as for Llama's: see the classes
`transformers.modeling_layers.GenericFor...`.
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

    Args:
        config: the configuration.

    Raises:
        NotImplementedError: for options of FLA's that do nothing there, by name; in forward, for
            packed sequences.
    """

    def __init__(self, config: GLAConfig) -> None:
        super().__init__(config)
        self.model.one_sequence_a_row = True


class GLAForTokenClassification(GenericForTokenClassification, GLAPreTrainedModel):
    """`GLAModel`, dropout (0.1, or `config.classifier_dropout`) and a linear map `score` of every
    token to `config.num_labels`.

    Args:
        config: the configuration.

    Raises:
        NotImplementedError: for options of FLA's that do nothing there, by name.
    """


class GLAForQuestionAnswering(GenericForQuestionAnswering, GLAPreTrainedModel):
    """`GLAModel` and a linear map `qa_outputs` of every token to two logits: that a span starts and
    that it ends there.

    Args:
        config: the configuration.

    Raises:
        NotImplementedError: for options of FLA's that do nothing there, by name; in forward, for
            packed sequences.
    """

    # transformers' look for embed_tokens.
    get_input_embeddings = GLAPreTrainedModel.get_input_embeddings
    set_input_embeddings = GLAPreTrainedModel.set_input_embeddings

    def __init__(self, config: GLAConfig) -> None:
        super().__init__(config)
        self.model.one_sequence_a_row = True


__all__ = ["GLAForQuestionAnswering", "GLAForSequenceClassification", "GLAForTokenClassification"]
