"""LangChain's standard integration tests on the bundled reader and a scripted model."""

from langchain_tests.integration_tests import ChatModelIntegrationTests
from scripted_tools import tool_calling_llm

from langchain_ragaccel import ChatRagaccel


class TestReader(ChatModelIntegrationTests):
    @property
    def chat_model_class(self):
        return ChatRagaccel

    @property
    def chat_model_params(self):
        return {"device": "cpu"}

    @property
    def supports_model_override(self):
        return False  # an object has one model and refuses another

    @property
    def has_tool_calling(self):
        return False  # its chat template does not support tools

    @property
    def has_structured_output(self):
        return False


class TestScripted(ChatModelIntegrationTests):
    """Tools and schemas, on a scripted model that answers in its template's format."""

    @property
    def chat_model_class(self):
        return ChatRagaccel

    @property
    def chat_model_params(self):
        return {"llm": tool_calling_llm()}

    @property
    def supports_json_mode(self):
        return True

    @property
    def supports_anthropic_inputs(self):
        return True

    @property
    def supports_model_override(self):
        return False
