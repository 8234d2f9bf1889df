"""GLA language models for Hugging Face transformers (4.55 and newer, 5.x).

Importing it registers `GLAConfig`, `GLAModel` and `GLAForCausalLM` for the model type 'gla' with
AutoConfig, AutoModel and AutoModelForCausalLM. FLA registers its own classes under the same name
when it is imported; the last one counts, and `register()` makes that these.
"""

try:
    import transformers  # noqa: F401
except ImportError as error:
    raise ImportError(
        "gla_ext.hf needs transformers 4.55 or newer: pip install 'gla_ext[hf]', or "
        "pip install 'transformers>=4.55'"
    ) from error

from gla_ext.hf.configuration import GLAConfig
from gla_ext.hf.modeling import GLAForCausalLM, GLAModel, GLAPreTrainedModel


def register() -> None:
    """Makes the Auto classes of transformers take these classes for the model type 'gla'."""
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    AutoConfig.register(GLAConfig.model_type, GLAConfig, exist_ok=True)
    AutoModel.register(GLAConfig, GLAModel, exist_ok=True)
    AutoModelForCausalLM.register(GLAConfig, GLAForCausalLM, exist_ok=True)


register()

__all__ = ["GLAConfig", "GLAForCausalLM", "GLAModel", "GLAPreTrainedModel", "register"]
