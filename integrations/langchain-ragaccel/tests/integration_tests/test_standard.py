"""The standard integration tests of LangChain, on the reader that comes with ragaccel."""

from langchain_tests.integration_tests import ChatModelIntegrationTests

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
        return False  # one object answers with one model, and says so
