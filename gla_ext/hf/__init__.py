"""GLA language models for Hugging Face transformers (4.55 and newer, 5.x).

Importing this package registers `GLAConfig`, `GLAModel`, `GLAForCausalLM` and the models with
another head for the model type 'gla' with AutoConfig, AutoModel, AutoModelForCausalLM and the Auto
classes of these heads. FLA registers its own under the same name when it is imported, which some
models of transformers do; this package's are then registered again. So whoever imports both gets
this package's from the Auto classes.
"""

from gla_ext._when_imported import when_imported

try:
    import transformers
except ImportError as error:
    raise ImportError(
        "gla_ext.hf needs transformers 4.55 or newer: pip install 'transformers>=4.55'"
    ) from error

from gla_ext.hf.configuration import GLAConfig
from gla_ext.hf.custom_code import add_custom_code
from gla_ext.hf.heads import (
    GLAForQuestionAnswering,
    GLAForSequenceClassification,
    GLAForTokenClassification,
)
from gla_ext.hf.modeling import GLAForCausalLM, GLAModel, GLAPreTrainedModel


def register() -> None:
    """Registers these classes for the model type 'gla' with the Auto classes of transformers."""
    transformers.AutoConfig.register(GLAConfig.model_type, GLAConfig, exist_ok=True)
    for auto, model in (
        (transformers.AutoModel, GLAModel),
        (transformers.AutoModelForCausalLM, GLAForCausalLM),
        (transformers.AutoModelForQuestionAnswering, GLAForQuestionAnswering),
        (transformers.AutoModelForSequenceClassification, GLAForSequenceClassification),
        (transformers.AutoModelForTokenClassification, GLAForTokenClassification),
    ):
        auto.register(GLAConfig, model, exist_ok=True)


register()
when_imported("fla.models.gla", lambda _: register())

__all__ = [
    "GLAConfig",
    "GLAForCausalLM",
    "GLAForQuestionAnswering",
    "GLAForSequenceClassification",
    "GLAForTokenClassification",
    "GLAModel",
    "GLAPreTrainedModel",
    "add_custom_code",
    "register",
]
